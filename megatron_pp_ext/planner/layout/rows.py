"""The shortest cut of a row of layers under a schedule that is given."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megatron_pp_ext.planner.layout.climb import Stages, fitted, levelled, shortened
from megatron_pp_ext.planner.layout.cut import Cut
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.timing import CriticalPath, ScheduleTimer


class Row(Stages, Protocol):
    """A row of items, of which the stages of one schedule are cut."""

    def costs(self, cut: Cut) -> Costs:
        """Return the costs of the stages of ``cut``."""

    def totals(self, cut: Cut) -> Sequence[float]:
        """Return the bytes that every rank needs; infinite where ``cut`` cannot be built."""


class Shortest(NamedTuple):
    """A cut with its makespan, and the makespan of the cut that it is compared with."""

    cut: Cut
    makespan: float
    before: float

    @property
    def gain(self) -> float:
        """The part of the makespan that the cut saves."""
        return 1 - self.makespan / self.before


def shortest(schedule: Schedule, row: Row, known: Cut, limit: float = 0.0) -> Shortest:
    """Return the cut of ``row`` whose pipeline is shortest under ``schedule``, as far as moves find it.

    They start from equally long stages, and from ``known``, with which the result is compared.  No rank needs
    more than ``limit`` bytes, or than the fullest one needs under ``known`` if that is more.
    """
    timer = ScheduleTimer(schedule)
    limit = max(limit, *row.totals(known))

    def replay(cut: Cut) -> CriticalPath:
        return timer.critical_path(row.costs(cut))

    def fits(cut: Cut) -> bool:
        return max(row.totals(cut)) <= limit

    starts = known, fitted(row, levelled(row, row.least), row.totals, limit)
    best = min(
        (
            shortened(row, start, schedule.microbatches, replay, fits)
            for start in dict.fromkeys(starts)
            if start is not None
        ),
        key=lambda one: one.value,
    )
    return Shortest(best.cut, best.value, replay(known).makespan)
