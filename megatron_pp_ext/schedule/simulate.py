"""Simulates a schedule with costs: the start and the end of every action, memory and message buffers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.check import walked
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.launch_order import in_line
from megatron_pp_ext.schedule.loops import Loop
from megatron_pp_ext.schedule.messages import SENDS_AHEAD
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.program import P2P, Column, Columns, T, as_list
from megatron_pp_ext.schedule.timing import ScheduleTimer
from megatron_pp_ext.schedule.walk import Walk


def most_buffers(walk: Walk) -> tuple[int, ...]:
    """Return the most message buffers that every rank of ``walk`` holds at one time.

    Its orders must flush: every message in them is sent and taken.  Two kinds of buffers are counted.

    * Receives, from where they are posted until an action takes the message.  A forward makes it an
      activation of its stage as soon as it starts; a backward needs it until its end, before which nothing
      else is posted.
    * Sent messages that may be unfinished: ``SENDS_AHEAD`` whenever the rank continues, and for a moment the
      one that it has just sent.  When each of them is done is known on the machine alone, so that many are
      counted from beginning to end, but no more than the rank sends.

    This is an upper bound of the buffers of a rank's channels: receives are posted and taken in no other
    places, and sends can only be done earlier.  Between two stages of one rank there is no message.
    """
    program, (_, line) = walk.program, in_line(walk)
    count, ranks = program.count, program.ranks
    *counts, most = map(program.make.zeros, (count, count, count + ranks, ranks, ranks, ranks))
    _count_buffers(program.columns, line, SENDS_AHEAD + 1, *counts, most)
    return tuple(as_list(most))


@Loop
def _count_buffers(
    columns: Columns,
    line: Column,
    ahead: int,
    receiver: Column,
    takes: Column,
    posted: Column,
    launched: Column,
    sent: Column,
    most: Column,
) -> None:
    """Count the ``most`` buffers of every rank, with the actions launched in the order of ``line``.

    ``receiver`` is the rank that an action sends to, plus 1, and 0 where it sends nothing; ``takes`` is 1
    where it takes one.  Rank r posts receives in front of each of its actions, and after the last: at
    ``bounds[r] + r`` in ``posted`` and on.
    """
    _, kind, _, rank_of, _, bounds, begins, needed, wires = columns
    for action in range(len(kind)):
        for entry in range(begins[action], begins[action + 1]):
            is_remote = rank_of[needed[entry]] != rank_of[action]
            if is_remote and wires[entry] == P2P and kind[action] != T:
                receiver[needed[entry]] = rank_of[action] + 1
                takes[action] = 1
    for action in line:
        rank = rank_of[action]
        launched[rank] += 1
        if receiver[action]:
            other = receiver[action] - 1
            posted[bounds[other] + other + launched[other]] += 1
            sent[rank] += 1
    for rank in range(len(most)):
        waiting = 0
        for action in range(bounds[rank], bounds[rank + 1]):
            waiting += posted[action + rank]
            most[rank] = max(most[rank], waiting)
            waiting -= takes[action]
        most[rank] += min(sent[rank], ahead)


class Event(NamedTuple):
    """One action with the times of its start and its end."""

    action: Action
    start: float
    end: float


class Copied(NamedTuple):
    """The times of the copies of a stage's activations of one microbatch to the host, and back.

    The device has no memory for them from ``freed`` until ``launched``, at which their copy back is
    launched.
    """

    stage: int
    microbatch: int
    out: tuple[float, float]
    freed: float
    launched: float
    back: tuple[float, float]


@dataclass(frozen=True, repr=False)
class Timeline:
    """A simulated schedule: ``events[r]`` are the actions of rank r with their times, in order.

    ``copies[r]`` are rank r's in the order in which they are reloaded, and empty where it has none.

    There are two lengths.  ``makespan`` is the time from the first start to the last end over all ranks,
    the time of a step with a synchronous optimizer.  ``span`` is the longest time that any one rank
    takes from its own first start to its own last end.  It is the papers' cost, and is reached only when
    optimizer steps do not wait for the whole pipeline.

    What is derived from the events is computed once, when it is first asked for.
    """

    schedule: Schedule
    costs: Costs
    events: tuple[tuple[Event, ...], ...]
    copies: tuple[tuple[Copied, ...], ...] = ()

    def __repr__(self) -> str:
        schedule = self.schedule
        return (
            f"<Timeline of {schedule.name}: {schedule.ranks} ranks, {schedule.whole_microbatches} "
            f"microbatches, makespan {self.makespan:.5g}, bubble {self.bubble:.1%}, fullest rank "
            f"{max(self.peak_microbatches):.4g} microbatches>"
        )

    @cached_property
    def start(self) -> float:
        """The start of the first action of any rank."""
        return min(events[0].start for events in self.events if events)

    @cached_property
    def end(self) -> float:
        """The end of the last action of any rank."""
        return max(events[-1].end for events in self.events if events)

    @cached_property
    def makespan(self) -> float:
        """The time from the first start to the last end over all ranks."""
        return self.end - self.start

    @cached_property
    def span(self) -> float:
        """The time from first start to last end of the rank for which that is longest."""
        return max(events[-1].end - events[0].start for events in self.events if events)

    @cached_property
    def bubble(self) -> float:
        """The fraction of ranks x makespan in which a rank is idle."""
        return 1 - self._busy / (len(self.events) * self.makespan)

    @cached_property
    def bubble_span(self) -> float:
        """The fraction of ranks x span in which a rank is idle."""
        return 1 - self._busy / (len(self.events) * self.span)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The most activations each rank keeps at one time, in the unit of ``StageCosts.activation``."""
        return tuple(max(live for _, live in self.memory(rank)) for rank in range(len(self.events)))

    @cached_property
    def peak_on_host(self) -> tuple[float, ...]:
        """The most that each rank has on the host, from the start of a copy to the end of the one back."""

        def peak(copies: tuple[Copied, ...]) -> float:
            changes = [(0.0, 0.0)]
            for copied in copies:
                size = self.costs.kept(Action(copied.stage, Kind.F, copied.microbatch))
                changes += [(copied.out[0], size), (copied.back[1], -size)]
            return max(accumulate(amount for _, amount in sorted(changes)))

        return tuple(map(peak, self.copies)) or (0.0,) * len(self.events)

    @cached_property
    def peak_messages(self) -> tuple[int, ...]:
        """The most message buffers each rank holds at one time; see ``most_buffers``."""
        return peak_messages(self.schedule)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """``peak_activations`` plus ``Costs.message`` for each of ``peak_messages``.

        Memory limits apply to this amount.  It is an upper bound of a rank's memory, as the two peaks need
        not be at the same moment.
        """
        if not self.costs.message:
            return self.peak_activations
        return tuple(
            activations + messages * self.costs.message
            for activations, messages in zip(self.peak_activations, self.peak_messages, strict=True)
        )

    @cached_property
    def peak_microbatches(self) -> tuple[float, ...]:
        """``peak_activations`` in units of all that the rank keeps of one microbatch: 1F1B's rank 0 has p.

        In this unit, schedules with different numbers of chunks compare.
        """
        stages, schedule = self.schedule.placement.stages_of, self.schedule
        units = schedule.microbatches / schedule.whole_microbatches
        wholes = (
            units * sum(self.costs.stages[s].activation for s in stages(r)) for r in range(len(self.events))
        )
        return tuple(
            peak / whole if whole else 0.0 for peak, whole in zip(self.peak_activations, wholes, strict=True)
        )

    def memory(self, rank: int) -> Iterator[tuple[float, float]]:
        """Yield (time, live activations from then on): the steps of the rank's memory curve.

        A rank does one thing at a time, so memory that an action freed at its end is gone when a
        forward starts at that very moment.
        """
        changes = self.changes(rank)
        if self.copies:
            changes = sorted([*changes, *changes_by(self.copies[rank], self.costs)])
        live = 0.0
        yield self.start, live
        for time, change in changes:
            live += change
            yield time, live

    def changes(self, rank: int) -> list[tuple[float, float]]:
        """Return (time, activations that are kept from then on), or given back, by the rank's actions.

        What a backward has while it runs (``StageCosts.workspace``) is kept from its start and given back at
        its end.
        """
        changes = []
        for action, start, end in self.events[rank]:
            growth = self.costs.growth(action)
            changes += [(start, growth), (end, self.costs.kept(action) - growth)]
        return [change for change in changes if change[1]]

    @cached_property
    def _busy(self) -> float:
        # The forward of a pair starts and ends with its backward.
        paired = self.schedule.paired
        return sum(
            end - start for events in self.events for action, start, end in events if action not in paired
        )


def changes_by(copies: Iterable[Copied], costs: Costs) -> Iterator[tuple[float, float]]:
    """Yield (time, activations that are kept from then on), or freed, by ``copies``."""
    for stage, microbatch, _, freed, launched, _ in copies:
        size = costs.kept(Action(stage, Kind.F, microbatch))
        yield freed, -size
        yield launched, size


def peak_messages(schedule: Schedule) -> tuple[int, ...]:
    """Return the most message buffers that each rank holds at one time, which do not depend on costs."""
    return most_buffers(walked(schedule))


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate ``schedule`` with ``costs``, or at unit cost: F, I and W of a whole rank take 1 each.

    Raises ValueError when ``costs`` are for another number of stages, or lack the costs of a split head,
    and InvalidSchedule (see ``check``) when the ranks wait for each other.

    The model is the papers': a rank works strictly in its order, an action starts as soon as the rank is free
    and its inputs have arrived, and messages never queue for a wire.  A pair (``Schedule.paired``) starts as
    soon as the inputs of both of its actions have arrived, and takes a part of their sum (``Costs.pair``);
    the outputs of both leave at its end.
    """
    placement = schedule.placement
    costs = Costs.per_rank(placement.ranks, placement.chunks) if costs is None else costs
    if placement.splits_head and costs.head is None:
        raise ValueError(
            f"schedule {schedule.name!r} splits the head, but its costs are not given: set Costs.head"
        )
    if len(costs.stages) != placement.stages:
        raise ValueError(
            f"costs are given for {len(costs.stages)} stages, but schedule {schedule.name!r} has "
            f"{placement.stages}: give one StageCosts a stage"
        )
    timer = ScheduleTimer(schedule)
    starts, ends = timer.times(costs)
    return Timeline(
        schedule,
        costs,
        tuple(
            tuple(Event(action, starts[step], ends[step]) for action, step in zip(order, steps, strict=True))
            for order, steps in zip(schedule.orders, timer.steps, strict=True)
        ),
        _copied(timer.walk, placement, starts, ends),
    )


def _copied(walk: Walk, placement: Placement, starts: Column, ends: Column) -> tuple[tuple[Copied, ...], ...]:
    """Return the copies of every rank of ``walk`` with their times; none where no rank has any."""
    if walk.copies is None:
        return ()
    copies: list[list[Copied]] = [[] for _ in range(placement.ranks)]
    for (stage, microbatch), out, freed, launch, back in zip(*walk.copies, strict=True):
        copied = (starts[out], ends[out]), ends[freed], ends[launch], (starts[back], ends[back])
        copies[placement.rank_of(stage)].append(Copied(stage, microbatch, *copied))
    return tuple(map(tuple, copies))
