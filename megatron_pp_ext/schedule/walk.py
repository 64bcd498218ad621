"""The walk: all ranks go through a program, each in its order, and no action before what it waits for.

It is the one loop in which the ranks run.  Check, simulation, messages, memory and critical path are readings
of it.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import NamedTuple

from megatron_pp_ext.schedule.actions import Action, Kept, Kind, Schedule, together
from megatron_pp_ext.schedule.loops import Loop
from megatron_pp_ext.schedule.program import OWN, SUMS, Column, Columns, Program, as_list


class WalkSteps(NamedTuple):
    """The steps of a walk, counted from 1; each follows those that it waits for, and 0 is no step.

    A step is an action or a pair.  It follows the step ``before`` it on its rank and the one that ``sends``
    its input, which comes over ``wire``; it takes the duration at ``place``.  One with several inputs follows
    steps without work, each of which waits for one of them.
    """

    before: Column
    sends: Column
    wire: Column
    place: Column


class CopySteps(NamedTuple):
    """The steps of copies, in the order in which each rank launches those back.

    ``kept`` has the stage and the microbatch of each, ``out`` the step of its copy to the host and ``back``
    the step of its copy back, which is launched at the end of the step ``launch``.  At the end of ``freed``
    the memory is free.
    """

    kept: Sequence[Kept]
    out: Column
    freed: Column
    launch: Column
    back: Column


class Walk:
    """The ``steps`` of ``program``.

    ``step_of`` is the step of every action, 0 where it was not reached, and ``at[r]`` the action at which
    rank r ended.  ``copies`` are those that ``with_copies`` has put into it.

    Without a clock it finds the steps of a program, in an order in which each follows all that it waits for,
    or the places at which the ranks wait for each other.  What an action waits for does not depend on costs,
    so the steps are found once, and timed with as many costs as there are: a step starts as soon as the step
    before it on its rank has ended and its input has arrived.  Messages never queue for a wire.
    """

    copies: CopySteps | None = None

    def __init__(self, program: Program) -> None:
        self.program, make = program, program.make
        columns, count, ranks = program.columns, program.count, program.ranks
        self.step_of, self.at = make.zeros(count + 1), make.of(columns.bounds[:-1])
        # In addition to an action's own, a step for each further input, which only the backward after an S
        # has.
        steps = WalkSteps(*(make.zeros(1 + len(columns.needed) - count) for _ in WalkSteps._fields))
        waiting = make.zeros(count + 1), make.zeros(ranks), make.of(range(ranks)), make.zeros(ranks)
        filled = _walk(columns, program.no_work, *waiting, self.at, self.step_of, steps)
        self.steps = WalkSteps(*(column[: filled + 1] for column in steps))

    @property
    def is_complete(self) -> bool:
        """Whether all ranks reached their end."""
        return as_list(self.at) == as_list(self.program.columns.bounds)[1:]

    @property
    def line(self) -> list[int]:
        """The actions in the order of their steps, of a walk that is complete."""
        return as_list(self.program.make.order(self.step_of[:-1]))

    def times(
        self, durations: Column, delays: Sequence[float], place: Column | None = None, kind: type = float
    ) -> tuple[Column, Column]:
        """Return the starts and the ends of all steps by their numbers; both are 0 for no step.

        ``durations`` are by place, where the steps have theirs or another ``place``, and ``delays`` by wire;
        all are of this ``kind``, int or float.
        """
        make, steps = self.program.make, self.steps if place is None else self.steps._replace(place=place)
        starts, ends = (make.zeros(len(steps.before), kind) for _ in range(2))
        _time(steps, make.of(durations, kind), make.of(delays, kind), starts, ends)
        return starts, ends

    def times_of_each(
        self,
        seconds: Sequence[float],
        delays: Sequence[float],
        of_pair: Callable[[float, float], float] = max,
        copy_seconds: Sequence[float] = (),
    ) -> tuple[Column, Column]:
        """Return ``times`` for ``seconds`` of each action, of which a pair takes a part.

        ``copy_seconds`` has the time of a copy for each stage.
        """
        durations, latest = [0.0] * len(self.steps.before), 0
        for action, step in enumerate(as_list(self.step_of)[:-1]):
            alone = seconds[action]
            durations[step] = of_pair(seconds[action - 1], alone) if step == latest else alone
            latest = step
        if self.copies:
            for (stage, _), out, _, _, back in zip(*self.copies, strict=True):
                durations[out] = durations[back] = copy_seconds[stage]
        return self.times(durations, delays, self.program.make.of(range(len(durations))))

    def critical(self, starts: Column, ends: Column, pair: float) -> tuple[float, list[float]]:
        """Return the last end, and how often the duration at each place is on the critical path.

        On it are the steps that follow each other without a wait up to the last end, by the results of
        ``times``; among several such paths, the one that stays on its ranks.  An action in a pair counts as
        ``pair``.
        """
        program, make = self.program, self.program.make
        halves = make.of(chain.from_iterable(program.pairs))
        counts = make.zeros(program.no_work + 1, float)
        end = _follow(self.steps, starts, ends, halves, pair, counts)
        return end, as_list(counts)


@Loop
def _walk(
    columns: Columns,
    no_work: int,
    last_waiting: Column,
    next_waiting: Column,
    runnable: Column,
    latest: Column,
    at: Column,
    step_of: Column,
    steps: WalkSteps,
) -> int:
    """Fill ``at``, ``step_of`` and ``steps``; return how many steps there are.

    The ranks that wait for an action form a circle: ``next_waiting`` leads from the last of them, which is
    ``last_waiting`` of the action, plus 1, to the one that has waited longest.
    """
    _, _, _, rank_of, place_of, bounds, begins, needed, wires = columns
    before, sends, wire, place = steps
    filled, able = 0, len(runnable)
    while able:
        able -= 1
        rank = runnable[able]
        while at[rank] < bounds[rank + 1]:
            first = at[rank]
            after = first + 2 if place_of[first] > no_work else first + 1
            missing = -1
            for entry in range(begins[first], begins[after]):
                if not step_of[needed[entry]]:
                    missing = needed[entry]
                    break
            if missing >= 0:
                last = last_waiting[missing] - 1
                if last < 0:
                    next_waiting[rank] = rank
                else:
                    next_waiting[rank] = next_waiting[last]
                    next_waiting[last] = rank
                last_waiting[missing] = rank + 1
                break
            step, sender, over = latest[rank], 0, 0
            for entry in range(begins[first], begins[after]):
                need, by = needed[entry], wires[entry]
                if rank_of[need] == rank:
                    if by != SUMS:
                        continue
                    by = OWN
                if sender:
                    filled += 1
                    before[filled], sends[filled], wire[filled], place[filled] = step, sender, over, no_work
                    step = filled
                sender, over = step_of[need], by
            filled += 1
            before[filled], sends[filled], wire[filled], place[filled] = step, sender, over, place_of[first]
            latest[rank] = filled
            at[rank] = after
            for action in range(first, after):
                step_of[action] = filled
                last = last_waiting[action] - 1
                if last >= 0:
                    waiting = next_waiting[last]
                    while waiting != last:
                        runnable[able] = waiting
                        able += 1
                        waiting = next_waiting[waiting]
                    runnable[able] = last
                    able += 1
    return filled


@Loop
def _time(steps: WalkSteps, durations: Column, delays: Column, starts: Column, ends: Column) -> None:
    before, sends, wire, place = steps
    for step in range(1, len(before)):
        start = ends[before[step]]
        if sends[step]:
            arrival = ends[sends[step]] + delays[wire[step]]
            if arrival > start:
                start = arrival
        starts[step] = start
        ends[step] = start + durations[place[step]]


@Loop
def _follow(
    steps: WalkSteps, starts: Column, ends: Column, halves: Column, pair: float, counts: Column
) -> float:
    """Count the durations on the critical path, and return its end."""
    before, sends, _, place = steps
    step = 0
    for other in range(1, len(ends)):
        if ends[other] > ends[step]:
            step = other
    end = ends[step]
    while step:
        at = place[step] - len(counts)
        if at < 0:
            counts[at] += 1
        elif 2 * at < len(halves):  # places after those of pairs are of copies
            counts[halves[2 * at]] += pair
            counts[halves[2 * at + 1]] += pair
        step = before[step] if ends[before[step]] == starts[step] else sends[step]
    return end


def with_copies(walk: Walk, schedule: Schedule) -> Walk:
    """Return ``walk``, a walk of all of ``schedule`` without copies, with the copies of ``schedule``.

    A copy is a step after two others: the copy before it on its engine, and the action that it waits for on
    its rank.  The rank in turn waits for a copy to the host where it frees the memory, and for one back
    before the backward.  All of that was launched before it on the same rank, so that copies never make ranks
    wait in a circle: they are put into a walk that was found without them, as often as there are plans.
    """
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
