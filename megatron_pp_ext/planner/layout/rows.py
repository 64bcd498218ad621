"""The shortest cut of a row of layers under a schedule that is given."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megatron_pp_ext.planner.layout.balance import balanced, levelled
from megatron_pp_ext.planner.layout.cut import Cut
from megatron_pp_ext.planner.layout.fit import fitted
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.timing import CriticalPath, ScheduleTimer


class Row(Protocol):
    """A row of items, of which the stages of one schedule are cut."""

    @property
    def items(self) -> int:
        """The number of items."""

    @property
    def least(self) -> Cut:
        """The fewest items of each stage."""

    def seconds(self, stage: int, first: int, end: int) -> tuple[float, float, float]:
        """Return the seconds of F, I and W of ``stage`` if it has the items first, ..., end - 1."""

    def costs(self, cut: Cut) -> Costs:
        """Return the costs of the stages of ``cut``."""

    def totals(self, cut: Cut) -> Sequence[float]:
        """Return the bytes that every rank needs; infinite where ``cut`` cannot be built."""


class Found(NamedTuple):
    """A cut with its makespan, and the makespan of the cut that it is compared with."""

    cut: Cut
    makespan: float
    before: float

    @property
    def gain(self) -> float:
        """The part of the makespan that the cut saves."""
        return 1 - self.makespan / self.before


def shortest(schedule: Schedule, row: Row, known: Cut, limit: float = 0.0) -> Found:
    """Return the cut of ``row`` whose pipeline is shortest under ``schedule``, as far as moves find it.

    They start from equally long stages, and from ``known``, with which the result is compared.  No rank needs
    more than ``limit`` bytes, or than the fullest one needs under ``known`` if that is more.
    """
    # Numba takes a while to import, and most jobs and estimates choose no layout.
    from megatron_pp_ext.planner.layout.shorten import shorten

    placement, timer = schedule.placement, ScheduleTimer(schedule)
    limit = max(limit, *row.totals(known))

    def replay(cut: Cut) -> CriticalPath:
        return timer.critical_path(row.costs(cut))

    def fits(cut: Cut) -> bool:
        return max(row.totals(cut)) <= limit

    level = levelled(placement, balanced(row.items, row.seconds, row.least), row.seconds, row.least)
    starts = known, fitted(level, placement, row.seconds, row.totals, limit, row.least)
    found = [
        shorten(start, placement, schedule.microbatches, row.seconds, replay, fits, row.least)
        for start in dict.fromkeys(starts)
        if start is not None
    ]
    best = min(found, key=lambda one: one.makespan)
    return Found(best.cut, best.makespan, replay(known).makespan)
