"""A step as it ran: the records of its ranks, and how they become a Timeline and costs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Self

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs, HeadCosts, StageCosts
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import Event, Timeline
from megatron_pp_ext.schedule.spans import Span

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
