"""A step as it really ran: what a recorder heard, and how it becomes a Timeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Self

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import Event, Timeline


class Measured(NamedTuple):
    """One action: seconds on the machine's clock, bytes of activations alive at its end."""

    action: Action
    start: float
    end: float
    live_bytes: int


class Reduction(NamedTuple):
    """A bucket of a chunk's gradients on its way round the data-parallel ranks.

    In seconds, from its start to the moment when the step had waited for it.
    """

    chunk: int
    start: float
    end: float


class RankRecord(NamedTuple):
    """What one rank did in a step.

    ``peak_microbatches`` counts (stage, microbatch) pairs that held on to anything, which is what
    a schedule's peak counts too; ``peak_bytes`` is what they held.  ``clock_error`` is by how many
    seconds the rank's times may be off those of the first rank.  ``device_bytes`` is the most that the
    device's allocator has had at once since the process began, None on a CPU.
    """

    events: tuple[Measured, ...]
    peak_bytes: int
    peak_microbatches: int
    reductions: tuple[Reduction, ...] = ()
    clock_error: float = 0.0
    device_bytes: int | None = None

    def moved(self, seconds: float, clock_error: float) -> Self:
        """The same on a clock that is ``seconds`` ahead, known up to ``clock_error``."""
        return self._replace(
            events=tuple(e._replace(start=e.start + seconds, end=e.end + seconds) for e in self.events),
            reductions=tuple(
                r._replace(start=r.start + seconds, end=r.end + seconds) for r in self.reductions
            ),
            clock_error=clock_error,
        )


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What all ranks of a pipeline did in a step; ``records[r]`` is rank r's."""

    name: str
    placement: Placement
    records: tuple[RankRecord, ...]

    def timeline(self) -> Timeline:
        """The step on a clock that starts at 0, with the median seconds of each stage as costs."""
        start = min(record.events[0].start for record in self.records)
        orders = tuple(tuple(event.action for event in record.events) for record in self.records)
        microbatches = 1 + max(action.microbatch for order in orders for action in order)
        return Timeline(
            Schedule(self.name, self.placement, microbatches, orders),
            Costs(tuple(self._stage_costs(stage) for stage in range(self.placement.stages))),
            tuple(
                tuple(Event(e.action, e.start - start, e.end - start) for e in record.events)
                for record in self.records
            ),
        )

    def _stage_costs(self, stage: int) -> StageCosts:
        events = self.records[self.placement.rank_of(stage)].events
        seconds = {
            kind: [e.end - e.start for e in events if e.action.stage == stage and e.action.kind is kind]
            for kind in Kind
        }
        if seconds[Kind.B]:
            # A whole backward cannot be told apart afterwards; half and half is as good as any.
            half = _median(seconds[Kind.B]) / 2
            return StageCosts(_median(seconds[Kind.F]), half, half)
        return StageCosts(*(_median(seconds[kind]) for kind in (Kind.F, Kind.I, Kind.W)))


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
