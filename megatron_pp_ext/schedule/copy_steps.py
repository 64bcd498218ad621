"""Copies to the host and back as steps of a walk, on a copy engine each way for every rank.

A copy is a step after two others: the copy before it on its engine, and the action that it waits for on its
rank.  The rank in turn waits for a copy to the host where it frees the memory, and for one back before the
backward.  All of that was launched before it on the same rank, so that copies never make ranks wait in a
circle: they are put into a walk that was found without them, as often as there are plans.
"""

from collections.abc import Mapping, Sequence
from copy import copy

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule, together
from megatron_pp_ext.schedule.columns import Column
from megatron_pp_ext.schedule.copies import Kept
from megatron_pp_ext.schedule.loops import Loop
from megatron_pp_ext.schedule.program import OWN, Columns
from megatron_pp_ext.schedule.walk import CopySteps, Walk, WalkSteps


def with_copies(walk: Walk, schedule: Schedule) -> Walk:
    """Return ``walk``, a walk of all of ``schedule`` without copies, with the copies of ``schedule``."""
    program, make, copies = walk.program, walk.program.make, schedule.copies
    actions = program.actions
    freed: dict[Action, list[Kept]] = {}
    for order in schedule.orders:
        freed |= copies.freed_before(list(together(order, schedule.paired)))
    reloaded, begins = _in_front(actions, copies.reloaded_before(actions))
    to_free, free_begins = _in_front(actions, freed)
    number = {unit: at for at, unit in enumerate(reloaded, 1)}

    def numbers(*kinds: Kind) -> Column:
        return make.of(number.get((stage, of), 0) if kind in kinds else 0 for stage, kind, of in actions)

    result, size = copy(walk), len(walk.steps.before) + 5 * len(reloaded)
    result.step_of = make.zeros(program.count + 1)
    result.steps = WalkSteps(*(make.zeros(size) for _ in WalkSteps._fields))
    result.copies = CopySteps(reloaded, *(make.zeros(len(reloaded)) for _ in CopySteps._fields[1:]))
    _insert(
        program.columns,
        make.of(walk.line),
        (make.of(begins), numbers(Kind.F), numbers(Kind.I, Kind.B)),
        (make.of(free_begins), make.of(number[unit] - 1 for unit in to_free)),
        (program.no_work, program.no_work + 1 + len(program.pairs)),
        (walk.step_of, walk.steps, make.zeros(len(walk.steps.before))),
        tuple(make.zeros(program.ranks) for _ in range(3)),
        result.step_of,
        result.steps,
        result.copies[1:],
    )
    return result


def _in_front(
    actions: Sequence[Action], units: Mapping[Action, Sequence[Kept]]
) -> tuple[list[Kept], list[int]]:
    """Return the ``units`` in front of ``actions`` in one row, and where those of each action begin."""
    row: list[Kept] = []
    begins = [0]
    for action in actions:
        row += units.get(action, ())
        begins.append(len(row))
    return row, begins


@Loop
def _insert(
    columns: Columns,
    line: Column,
    numbers: tuple[Column, Column, Column],
    freeing: tuple[Column, Column],
    places: tuple[int, int],
    without: tuple[Column, WalkSteps, Column],
    latest: tuple[Column, Column, Column],
    step_of: Column,
    steps: WalkSteps,
    copied: tuple[Column, Column, Column, Column],
) -> None:
    """Fill ``step_of``, ``steps`` and ``copied``, from the steps ``without`` copies.

    The copies back from ``begins[a]`` to ``begins[a + 1]`` are launched before action a; the copy to the host
    ``outgoing[a]`` is launched after it, and it waits for the copy back ``waiting[a]``, both counted from 1.
    From ``free_begins[a]`` to ``free_begins[a + 1]`` there are the copies whose memory is freed before it.
    """
    stage_of, _, _, rank_of, _, _, _, _, _ = columns
    begins, outgoing, waiting = numbers
    free_begins, to_free = freeing
    no_work, first_place = places
    old_of, (old_before, old_sends, old_wire, old_place), moved = without
    before, sends, wire, place = steps
    on_rank, to_host, from_host = latest
    out, freed, launch, back = copied
    filled = at = 0
    for step in range(1, len(old_before)):
        first = at
        while at < len(line) and old_of[line[at]] == step:
            at += 1
        prior = moved[old_before[step]]
        for action in line[first:at]:
            rank = rank_of[action]
            for entry in range(free_begins[action], free_begins[action + 1]):
                filled += 1
                before[filled], sends[filled] = prior, out[to_free[entry]]
                wire[filled], place[filled] = OWN, no_work
                prior = on_rank[rank] = freed[to_free[entry]] = filled
            for number in range(begins[action], begins[action + 1]):
                filled += 2
                before[filled - 1], sends[filled - 1] = from_host[rank], on_rank[rank]
                wire[filled - 1], place[filled - 1] = OWN, no_work
                before[filled], sends[filled] = filled - 1, out[number]
                launch[number] = on_rank[rank]
                back[number] = from_host[rank] = filled
        for action in line[first:at]:
            if waiting[action]:
                number = waiting[action] - 1
                wire[back[number]], place[back[number]] = OWN, first_place + stage_of[action]
                filled += 1
                before[filled], sends[filled], wire[filled], place[filled] = prior, back[number], OWN, no_work
                prior = filled
        filled += 1
        before[filled], sends[filled] = prior, moved[old_sends[step]]
        wire[filled], place[filled] = old_wire[step], old_place[step]
        moved[step] = filled
        for action in line[first:at]:
            rank = rank_of[action]
            step_of[action] = on_rank[rank] = moved[step]
            if outgoing[action]:
                filled += 1
                before[filled], sends[filled] = to_host[rank], on_rank[rank]
                wire[filled], place[filled] = OWN, first_place + stage_of[action]
                out[outgoing[action] - 1] = to_host[rank] = filled
