"""The walk: all ranks go through a program, each in its order, and no action before its needs.

It is the one loop in which the ranks run.  Without a clock it finds the steps of a program, in an order in
which each follows all that it waits for, or the places at which the ranks wait for each other.  What an
action waits for does not depend on costs, so the steps are found once, and timed with as many costs as there
are: a step starts as soon as the step before it on its rank has ended and its input has arrived.  Messages
never queue for a wire.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from megatron_pp_ext.schedule.columns import Column, as_list
from megatron_pp_ext.schedule.copies import Kept
from megatron_pp_ext.schedule.loops import Loop
from megatron_pp_ext.schedule.program import OWN, SUMS, Columns, Program


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
    rank r ended.  ``copies`` are those that ``copy_steps.with_copies`` has put into it.
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
        self,
        durations: Column,
        delays: Sequence[float],
        place: Column | None = None,
        kind: type = float,
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
