"""The order in which all ranks of a pipeline launch their actions, and receives whose shapes are announced.

``schedule.messages`` has the proof that no pipeline can hang in any such order.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise
from operator import add

from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Announced, Kind, Orders
from megatron_pp_ext.schedule.check import InvalidSchedule
from megatron_pp_ext.schedule.program import KINDS, Column, F, Program, as_list
from megatron_pp_ext.schedule.walk import Walk


def late(walk: Walk, numbers: Column, starts: Column, ends: Column, orders: Orders) -> list[int]:
    """Return the ``numbers`` of all actions of ``orders`` anew, for inputs that announce their shapes.

    ``starts`` and ``ends`` are of the steps of ``walk``.

    The host of a rank that posts such a receive stops until the message has been sent.  The receive is posted
    where the sender's action stands in the order of launches (``schedule.messages``).  So nothing is lost if
    the sender's action comes after what the receiving rank does in the meantime:

    * Where the times of units are planned, after the receiver's last action that starts before the sender's
      ends. The message is then on its way during later actions.
    * Elsewhere lengths are not known, and no time can be relied on: after all that the receiver does before
      the action that takes the message.

    Actions are taken in the order of their simulated ends, as soon as nothing is left that they are to come
    after.  Under placements that come back to a rank, as those of interleaved schedules and of Vs, ranks may
    send to each other at the same time, and would wait for each other in this.  The first of them then goes
    on, and its receiver may have to stop for it.  The order remains one that every rank can keep to.
    """
    steps = range(1, len(walk.steps.before))
    actions = _actions_of(walk, numbers)
    place = dict.fromkeys(steps, 0) | {step: at for at, step in enumerate(actions, 1)}
    missing, followers = _needs(walk)
    waits = dict(_waits(walk, as_list(starts), as_list(ends), orders))
    waiting: dict[int, list[int]] = {}
    for sender, last in waits.items():
        waiting.setdefault(last, []).append(sender)

    finished, result = {0}, list[int]()
    able = [(place[step], step) for step in steps if not missing[step]]
    ready = [entry for entry in able if entry[1] not in waits]
    blocked = set(able) - set(ready)
    heapify(ready)
    while ready or blocked:
        if not ready:
            first = min(blocked)
            blocked.remove(first)
            ready.append(first)
        _, step = heappop(ready)
        finished.add(step)
        result += actions.get(step, ())
        for follower in followers[step]:
            missing[follower] -= 1
            if not missing[follower]:
                entry = place[follower], follower
                if follower in waits and waits[follower] not in finished:
                    blocked.add(entry)
                else:
                    heappush(ready, entry)
        for sender in waiting.get(step, ()):
            if (entry := (place[sender], sender)) in blocked:
                blocked.remove(entry)
                heappush(ready, entry)
    return result


def _actions_of(walk: Walk, numbers: Column) -> dict[int, list[int]]:
    actions: dict[int, list[int]] = {}
    step_of = as_list(walk.step_of)
    for number in as_list(numbers):
        actions.setdefault(step_of[number], []).append(number)
    return actions


def _needs(walk: Walk) -> tuple[list[int], list[list[int]]]:
    """Return how many other steps each follows, and the followers of each."""
    before, sends = as_list(walk.steps.before), as_list(walk.steps.sends)
    missing, followers = [0] * len(before), [list[int]() for _ in before]
    for step in range(1, len(before)):
        for need in {before[step], sends[step]} - {0}:
            followers[need].append(step)
            missing[step] += 1
    return missing, followers


def _waits(walk: Walk, starts: list[float], ends: list[float], orders: Orders) -> Iterator[tuple[int, int]]:
    """Yield the step of each sender of an announced message, and that which it is to come after, if any."""
    columns, before, step_of = walk.program.columns, as_list(walk.steps.before), as_list(walk.step_of)
    stage, kind, microbatch, rank, _, bounds, *_ = map(as_list, columns)
    of_units = list(zip(stage, microbatch, strict=True))
    forwards = {unit: number for number, unit in enumerate(of_units) if kind[number] == F}
    is_timed, stages = bool(walk.program.durations), walk.program.placement.stages
    for (of_stage, unit), sender in forwards.items():
        target = of_stage + 1
        if target == stages or not orders.is_announced(target, unit):
            continue
        receiver = orders.rank_of(target, unit)
        if receiver == rank[sender]:
            continue
        taker = forwards.get((target, unit))
        # What later orders take is posted after all that the receiver does in these.
        last = step_of[bounds[receiver + 1] - 1] if taker is None else before[step_of[taker]]
        while last and starts[last] == ends[last]:  # an input of a pair is a step without work
            last = before[last]
        while is_timed and last and starts[last] >= ends[step_of[sender]]:
            last = before[last]
        if last:
            yield step_of[sender], last


WORK = {Kind.F: 1000, Kind.I: 1100, Kind.W: 700, Kind.B: 1800, Kind.S: 400, Kind.T: 200}
P2P = HIDDEN = 50
SUMS = 100
"""The simulated times of actions and messages, in the usual proportions of a transformer's layers.

``HIDDEN`` and ``SUMS`` are those of the exchanges about a split head (``Exchange``).  All are whole
numbers, so that the line is the same on every machine.  A schedule may have other times of actions
(``Schedule.durations``), in units of which a mean F takes as many.
"""


def launch_order(orders: Orders) -> list[tuple[int, int, Action]]:
    """Return all actions of ``orders``, each with its simulated end and its rank, in the order of launches.

    Actions are sorted by their simulated ends, and by rank where these are equal, from the last rank on where
    the placement ``ends_on_last``; the two of a pair, which end together, follow each other as on their rank.
    Messages from actions that are not in ``orders`` were sent before these began.  Where inputs of stages
    announce their shapes, their senders come later (``late``); a head that ranks share goes with
    known shapes alone.

    Raises InvalidSchedule where the ranks of ``orders`` wait for each other.
    """
    walk = walk_over(orders)
    program, (starts, ends) = walk.program, times(walk)
    of_actions = program.make.taken(ends, walk.step_of[:-1])
    numbers = _in_order(program, of_actions)
    if orders.announced is not Announced.NOTHING and not orders.placement.splits_head:
        numbers = late(walk, numbers, starts, ends, orders)
    return [(of_actions[number], program.columns.rank[number], program.actions[number]) for number in numbers]


def walk_over(orders: Orders) -> Walk:
    """Return the walk over ``orders``, some of whose messages may be from before.

    Raises InvalidSchedule where the ranks wait for each other.
    """
    walk = Walk(Program.of_orders(orders, is_open=True))
    if not walk.is_complete:
        raise InvalidSchedule("the ranks wait for each other: let schedule.check name the actions")
    return walk


def in_line(walk: Walk) -> tuple[Column, Column]:
    """Return the simulated ends of all actions in the order of launches, and their numbers."""
    program, (_, of_steps) = walk.program, times(walk)
    ends = program.make.taken(of_steps, walk.step_of[:-1])
    numbers = _in_order(program, ends)
    return program.make.taken(ends, numbers), numbers


def times(walk: Walk) -> tuple[Column, Column]:
    """Return the simulated starts and ends of all steps."""
    program = walk.program
    delays, stages = (P2P, HIDDEN, SUMS, SUMS), program.placement.stages
    no_copies = [0] * stages  # they change nothing about when messages leave
    if program.durations:
        return walk.times_of_each(_of_each(program), delays, add, no_copies)
    durations_of_kinds = [WORK[kind] for kind in OF_STAGES] * stages
    durations_of_kinds += WORK[Kind.S], WORK[Kind.T], 0
    durations = [
        *durations_of_kinds,
        *(durations_of_kinds[first] + durations_of_kinds[second] for first, second in program.pairs),
        *no_copies,
    ]
    return walk.times(durations, delays)


def _of_each(program: Program) -> list[int]:
    """Return the duration of each action; actions of stages have their unit's."""
    stages, kinds, units, *_ = map(as_list, program.columns)
    kinds_of_stage, of_units = len(OF_STAGES), program.durations
    return [
        of_units[unit][kinds_of_stage * stage + kind] if kind < kinds_of_stage else WORK[KINDS[kind]]
        for stage, kind, unit in zip(stages, kinds, units, strict=True)
    ]


def _in_order(program: Program, ends: Column) -> Column:
    """Return the numbers of actions by their ``ends``; equal ones by rank, from the one with stage 0 on."""
    if not program.placement.ends_on_last:
        return program.make.order(ends)  # they go by rank already
    ranks = reversed(list(pairwise(as_list(program.columns.bounds))))
    numbers = program.make.of(chain.from_iterable(range(*bounds) for bounds in ranks))
    return program.make.taken(numbers, program.make.order(program.make.taken(ends, numbers)))
