"""Rows of layers, and the shortest cut of one under a schedule that is given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import NamedTuple, Protocol

from megatron_pp_ext.planner.layout.climb import Stages, fitted, levelled, shortened
from megatron_pp_ext.planner.layout.cut import Cut, bounds
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.timing import CriticalPath, ScheduleTimer


class LayoutRow(Stages, Protocol):
    """A row of items, of which the stages of one schedule are cut."""

    def costs(self, cut: Cut) -> Costs:
        """Return the costs of the stages of ``cut``."""

    def totals(self, cut: Cut) -> Sequence[float]:
        """Return the bytes that every rank needs; infinite where ``cut`` cannot be built."""


type Seconds = tuple[float, float, float, float]
"""The seconds of F, I and W and, below 0, the saving of an I and a W together."""

NOTHING: Seconds = (0.0, 0.0, 0.0, 0.0)


def seconds_of(costs: StageCosts) -> Seconds:
    """Return the seconds of F, I and W in ``costs``, and minus the seconds that a B saves over I and W."""
    return costs.forward, costs.input_gradient, costs.weight_gradient, -costs.hidden


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Layers whose seconds add up, for stages that have the fewest layers in ``least``.

    ``front`` and ``back`` are the other seconds of the first and the last stage.  ``like`` has the
    times of messages.  ``totals`` returns the bytes that every rank needs under a cut.
    """

    layers: tuple[Seconds, ...]
    front: Seconds
    back: Seconds
    like: Costs
    placement: Placement
    least: Cut
    totals: Callable[[Cut], Sequence[float]]

    @property
    def items(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def seconds(self, stage: int, first: int, end: int) -> Seconds:
        """Return the seconds of ``stage`` if it has the layers first, ..., end - 1."""
        parts = [*self.layers[first:end]]
        parts += [self.front] if stage == 0 else []
        parts += [self.back] if stage == self.placement.stages - 1 else []
        forward, input_gradient, weight_gradient, saved = map(fsum, zip(NOTHING, *parts, strict=True))
        return forward, input_gradient, weight_gradient, saved

    def costs(self, cut: Cut) -> Costs:
        """Return the costs of the stages of ``cut``, whose activations are left out."""
        rows = (self.seconds(*position) for position in bounds(cut))
        stages = tuple(StageCosts(f, i, w, activation=0.0, hidden=min(-saved, w)) for f, i, w, saved in rows)
        return replace(self.like, stages=stages)


class Shortest(NamedTuple):
    """A cut with its makespan, and the makespan of the cut that it is compared with."""

    cut: Cut
    makespan: float
    before: float

    @property
    def gain(self) -> float:
        """The part of the makespan that the cut saves."""
        return 1 - self.makespan / self.before


def shortest(schedule: Schedule, row: LayoutRow, present: Cut, limit: float = 0.0) -> Shortest:
    """Return the cut of ``row`` whose pipeline is shortest under ``schedule``, as far as moves find it.

    They start from equally long stages, and from ``present``, with which the result is compared.  No rank
    needs more than ``limit`` bytes, or than the fullest one needs under ``present`` if that is more.
    """
    timer = ScheduleTimer(schedule)
    limit = max(limit, *row.totals(present))

    def replay(cut: Cut) -> CriticalPath:
        return timer.critical_path(row.costs(cut))

    def fits(cut: Cut) -> bool:
        return max(row.totals(cut)) <= limit

    starts = present, fitted(row, levelled(row, row.least), row.totals, limit)
    best = min(
        (
            shortened(row, start, schedule.microbatches, replay, fits)
            for start in dict.fromkeys(starts)
            if start is not None
        ),
        key=lambda climbed: climbed.value,
    )
    return Shortest(best.cut, best.value, replay(present).makespan)
