"""A step as it ran: the records of its ranks, their idle time, and the timeline and costs that follow."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Self

from megatron_pp_ext.schedule.actions import Action, Kind, Orders, Schedule, Span, delivers, needs
from megatron_pp_ext.schedule.costs import Costs, HeadCosts, StageCosts
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.program import WIRES, Program
from megatron_pp_ext.schedule.simulate import Event, Timeline
from megatron_pp_ext.schedule.walk import Walk

type KindSeconds = dict[tuple[int, Kind], float]
"""Seconds by stage and kind of action."""


class UnitNames(NamedTuple):
    """Units of the numbers of a step, as they are printed."""

    time: str
    memory: str


SECONDS = UnitNames("seconds", "bytes")
"""The units of recorded steps, and of simulated ones with measured costs."""


class Measured(NamedTuple):
    """One action: seconds on the machine's clock, and the bytes of activations alive at its end.

    ``processor_seconds`` is the time for which a core worked on it, in the thread that ran it.  It leaves out
    the time in which the thread waited for a core, and is None for actions that ran on a device.
    """

    action: Action
    start: float
    end: float
    live_bytes: float
    processor_seconds: float | None = None


class Reduction(NamedTuple):
    """The reduction of one bucket of a chunk's gradients over the data-parallel ranks.

    ``start`` is in seconds, as is ``end``, the moment at which the step had finished waiting for it.
    """

    chunk: int
    start: float
    end: float


class RankRecord(NamedTuple):
    """The record of one rank in one step.

    ``peak_microbatches`` counts the (stage, microbatch) pairs that kept any activations, as a schedule's
    peak does, and ``peak_bytes`` is the size of these.  The rank's times may differ from the clock of the
    first rank by ``clock_error`` seconds.  ``device_bytes`` is the most that the device's allocator has held
    at once since the process began, None on a CPU.  ``spans`` are what features record.
    """

    events: tuple[Measured, ...]
    peak_bytes: float
    peak_microbatches: int
    reductions: tuple[Reduction, ...] = ()
    clock_error: float = 0.0
    device_bytes: int | None = None
    spans: tuple[Span, ...] = ()

    @property
    def paired(self) -> frozenset[Action]:
        """The forwards that ran in a pair with the action after them, which began before they ended."""
        return frozenset(
            event.action for event, following in pairwise(self.events) if following.start < event.end
        )

    @property
    def busy(self) -> float:
        """The seconds in which the rank computed; the forward of a pair counts with the action after it."""
        paired = self.paired
        return sum(event.end - event.start for event in self.events if event.action not in paired)

    def moved(self, seconds: float, clock_error: float) -> Self:
        """Return the record on a clock that is ``seconds`` ahead, with an error of up to ``clock_error``."""
        return self._replace(
            events=tuple(e._replace(start=e.start + seconds, end=e.end + seconds) for e in self.events),
            reductions=tuple(
                r._replace(start=r.start + seconds, end=r.end + seconds) for r in self.reductions
            ),
            spans=tuple(s._replace(start=s.start + seconds, end=s.end + seconds) for s in self.spans),
            clock_error=clock_error,
        )


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The records of all ranks of a pipeline in one step; ``records[r]`` is rank r's.

    A simulated step has other ``units`` where its costs were not measured.
    """

    name: str
    placement: Placement
    records: tuple[RankRecord, ...]
    units: UnitNames = SECONDS

    @property
    def paired(self) -> frozenset[Action]:
        """The forwards that ran in pairs; see ``Schedule.paired``."""
        return frozenset().union(*(record.paired for record in self.records))

    def timeline(self) -> Timeline:
        """Return the step on a clock that starts at 0, with the median seconds of each stage as costs."""
        start = min(record.events[0].start for record in self.records)
        orders = tuple(tuple(event.action for event in record.events) for record in self.records)
        microbatches = 1 + max(action.microbatch for order in orders for action in order)
        seconds = kind_seconds(self.records, median)
        return Timeline(
            Schedule(self.name, self.placement, microbatches, orders, self.paired),
            Costs(
                tuple(stage_costs(stage, seconds) for stage in range(self.placement.stages)),
                head=head_costs(self.records) if self.placement.splits_head else None,
            ),
            tuple(
                tuple(Event(e.action, e.start - start, e.end - start) for e in record.events)
                for record in self.records
            ),
        )


def kind_seconds(records: Iterable[RankRecord], statistic: Callable[[list[float]], float]) -> KindSeconds:
    """Return ``statistic`` of the seconds of all actions in ``records``, for each stage and kind.

    Where a stage does some of a kind in pairs, only those count that it does alone.
    """
    alone: dict[tuple[int, Kind], list[float]] = {}
    in_pairs: dict[tuple[int, Kind], list[float]] = {}
    for record in records:
        paired = record.paired
        is_second = False
        for action, start, end, *_ in record.events:
            durations = in_pairs if is_second or action in paired else alone
            is_second = action in paired
            durations.setdefault((action.stage, action.kind), []).append(end - start)
    return {key: statistic(values) for key, values in (in_pairs | alone).items()}


def stage_costs(
    stage: int, seconds: Mapping[tuple[int, Kind], float], record: RankRecord | None = None
) -> StageCosts:
    """Return the costs of ``stage`` from the ``seconds`` of its actions (``kind_seconds``).

    A whole backward counts half for each gradient: its parts are not measured.  The bytes of activations
    are taken from ``record``, if one that counted them is given; otherwise activations count 1.
    """
    if whole := seconds.get((stage, Kind.B)):
        backward = whole / 2, whole / 2
    else:
        backward = seconds.get((stage, Kind.I), 0.0), seconds.get((stage, Kind.W), 0.0)
    return StageCosts(
        seconds.get((stage, Kind.F), 0.0), *backward, *(_kept_bytes(record, stage) if record else ())
    )


def head_costs(records: Sequence[RankRecord]) -> HeadCosts:
    """Return the costs of a rank's part of a split head, from the records of all ranks.

    Seconds are medians, and the bytes those that an S adds.  Its exchanges are not measured apart.  Where no
    rank has a T, as in an evaluation, a T counts as an S, and nothing is kept for it.
    """
    seconds: dict[Kind, list[float]] = {Kind.S: [], Kind.T: []}
    growths = []
    for record in records:
        before = 0.0
        for event in record.events:
            if event.action.kind in seconds:
                seconds[event.action.kind].append(event.end - event.start)
            if event.action.kind is Kind.S:
                growths.append(event.live_bytes - before)
            before = event.live_bytes
    scores = median(seconds[Kind.S])
    if not seconds[Kind.T]:
        return HeadCosts(scores, scores)
    return HeadCosts(scores, median(seconds[Kind.T]), max(0.0, median(growths)))


def _kept_bytes(record: RankRecord, stage: int) -> tuple[float, float]:
    """Return the bytes that a microbatch of ``stage`` keeps from its forward on, and those that its I frees.

    Both are medians over the microbatches in ``record``.  The latter is below 0 where an I keeps more than it
    gives back, as under recomputation.  A whole backward gives all back at its end.
    """
    growths: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    before = 0.0
    for event in record.events:
        if event.action.stage == stage:
            growths[event.action.kind].append(event.live_bytes - before)
        before = event.live_bytes
    after_forward = median(growths[Kind.F])
    if not growths[Kind.I]:
        return after_forward, 0.0
    return after_forward, min(after_forward, -median(growths[Kind.I]))


class Gap(NamedTuple):
    """The time from the end of one action of a rank to the start of its next.

    Where the next one needs the output of another rank, ``sent`` is the end of the action that made it;
    otherwise it is None.  ``since`` is None before the rank's first action.
    """

    since: float | None
    until: float
    sent: float | None


class Idle(NamedTuple):
    """The seconds in which a rank did nothing, by cause.

    ``warm_up`` is the time before its first action and ``cool_down`` the time after its last one, less the
    ``reductions`` of gradients that were still running then.  In between, ``unfinished_stages`` is the time
    in which the action on another rank that it waited for had not ended, and ``late_messages`` the time from
    then on.  ``overhead`` is the rest, in which it needed no message.
    """

    warm_up: float
    cool_down: float
    unfinished_stages: float
    late_messages: float
    reductions: float
    overhead: float


def gaps(step: RecordedStep) -> list[list[Gap]]:
    """Return the gaps of every rank, one before each of its actions."""
    placement = step.placement
    ended = {delivers(event.action): event.end for record in step.records for event in record.events}

    def of_rank(rank: int, events: Sequence[Measured]) -> Iterator[Gap]:
        since = None
        for action, start, end, *_ in events:
            sent = [
                ended[need]
                for need in needs(action, placement)
                if need in ended and placement.rank_of(need.stage) != rank
            ]
            # The second action of a pair begins with the first.
            yield Gap(since, start if since is None else max(start, since), max(sent, default=None))
            since = end if since is None else max(end, since)

    return [list(of_rank(rank, record.events)) for rank, record in enumerate(step.records)]


def message_seconds(step: RecordedStep) -> list[float]:
    """Return the seconds under way of every message that was sent while its receiver was idle.

    A receiver that was busy may have taken the message long after it arrived, so others do not count.  Where
    the clocks of two ranks differ, some of the times are negative.
    """
    return [
        gap.until - gap.sent
        for rank in gaps(step)
        for gap in rank
        if gap.sent is not None and (gap.since is None or gap.since <= gap.sent)
    ]


def idle_times(step: RecordedStep) -> list[Idle]:
    """Return the idle time of each rank by cause; the parts sum up to all its idle time in the step.

    The step lasts from the first start of an action of any rank to the last end of an action or reduction.
    """
    start, end = extent(step)
    return [
        _idle(record, own_gaps, start, end) for record, own_gaps in zip(step.records, gaps(step), strict=True)
    ]


def extent(step: RecordedStep) -> tuple[float, float]:
    """Return the times at which the step began and ended, reductions of gradients included."""
    begins = [record.events[0].start for record in step.records if record.events]
    ends = [record.events[-1].end for record in step.records if record.events]
    ends += [reduction.end for record in step.records for reduction in record.reductions]
    return min(begins), max(ends)


def _idle(record: RankRecord, own_gaps: Sequence[Gap], start: float, end: float) -> Idle:
    unfinished = late = overhead = 0.0
    for since, until, sent in own_gaps:
        if since is None:
            continue
        if sent is None:
            overhead += until - since
            continue
        arrival = min(max(since, sent), until)
        unfinished += arrival - since
        late += until - arrival
    last = record.events[-1].end
    reductions = _covered(record.reductions, last, end)
    warm_up = own_gaps[0].until - start
    return Idle(warm_up, end - last - reductions, unfinished, late, reductions, overhead)


def _covered(reductions: Sequence[Reduction], since: float, until: float) -> float:
    """Return the seconds between ``since`` and ``until`` in which any of ``reductions`` was running."""
    covered = 0.0
    for _, begin, end in sorted(reductions, key=lambda reduction: reduction.start):
        end = min(end, until)
        covered += max(0.0, end - max(begin, since))
        since = max(since, end)
    return covered


_SHORTEST = 1e-9
"""The shortest duration in seconds; costs must be above zero and clocks resolve no less."""


def measured_costs(steps: Sequence[RecordedStep]) -> Costs:
    """Return the costs measured in ``steps`` of one placement, in which all backwards are split in halves.

    Bytes are taken from the first step, the only one that must have counted them.  Seconds are medians over
    all microbatches of the other steps, where there are others, since counting takes time.  The P2P latency
    is the median time under way of the messages for which their receiver was waiting.
    """
    first, *later = steps
    timed = later or [first]
    seconds = kind_seconds(
        (record for step in timed for record in step.records),
        lambda durations: max(_SHORTEST, median(durations)),
    )
    latencies = [seconds for step in timed for seconds in message_seconds(step)]
    placement = first.placement
    return Costs(
        tuple(
            stage_costs(stage, seconds, first.records[placement.rank_of(stage)])
            for stage in range(placement.stages)
        ),
        max(0.0, median(latencies)) if latencies else 0.0,
        head=head_costs(first.records) if placement.splits_head else None,
    )


def costs_by_microbatch(step: RecordedStep) -> tuple[Costs, ...]:
    """Return the costs of each microbatch of ``step``, in whose record all backwards are split in halves.

    Activations are not counted.
    """
    seconds: dict[int, dict[tuple[int, Kind], float]] = {}
    for record in step.records:
        for action, start, end, *_ in record.events:
            of_microbatch = seconds.setdefault(action.microbatch, {})
            of_microbatch[action.stage, action.kind] = max(_SHORTEST, end - start)
    stages = range(step.placement.stages)
    return tuple(
        Costs(tuple(stage_costs(stage, seconds[number]) for stage in stages)) for number in sorted(seconds)
    )


def on_own_cores(step: RecordedStep) -> RecordedStep:
    """Return ``step`` with each action as long as its processor time, on a clock that starts at 0.

    Its name states that it is replayed.  Without a flush, a recording may begin in the middle of
    microbatches; inputs from before it are there from the start.  Reductions of gradients are left out: they
    are not the work of the rank's thread.  Raises ValueError if the step has no processor times, because it
    ran on a device or was simulated.

    Where ranks share cores, an action also lasts while its rank waits for a core, and the ranks that need its
    output wait with it: such a step shows the machine more than the schedule.  The processor time of an
    action does not depend on how many ranks share a core, except through the caches, so the step is timed
    anew from it: every rank works in its recorded order, and an action starts once its rank is free and its
    inputs exist. Messages take no time.
    """
    seconds: dict[Action, float] = {}
    for record in step.records:
        for event in record.events:
            if event.processor_seconds is None:
                raise ValueError(
                    f"the step of {step.name} has no processor times, which are recorded on CPUs only: show "
                    "it without --processor-time, or record it on CPUs"
                )
            if record.paired:
                raise ValueError(
                    f"the step of {step.name} has pairs, whose two actions share one processor time: show it "
                    "without --processor-time"
                )
            seconds[event.action] = event.processor_seconds
    orders = [[event.action for event in record.events] for record in step.records]
    walk = Walk(Program.of_orders(Orders(orders, step.placement), is_open=True))
    alone = [seconds[action] for action in walk.program.actions]
    starts, ends = walk.times_of_each(alone, [0.0] * len(WIRES))
    steps = iter(walk.step_of)
    return replace(
        step,
        name=f"{step.name}, replayed",
        records=tuple(
            record._replace(
                events=tuple(
                    event._replace(start=starts[at], end=ends[at])
                    for event, at in zip(record.events, steps, strict=False)
                ),
                reductions=(),
                clock_error=0.0,
            )
            for record in step.records
        ),
    )
