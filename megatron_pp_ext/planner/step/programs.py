"""Schedules prepared for the estimates of time and memory; each is built once."""

from dataclasses import replace
from functools import cached_property, lru_cache, partial

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Option, of_sizes
from megatron_pp_ext.planner.step.activation_peaks import InFlight
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.buffers import most_buffers
from megatron_pp_ext.schedule.placement import Placement, linear
from megatron_pp_ext.schedule.timing import ScheduleTimer


class Prepared:
    """A schedule with all that an estimate derives from it, of which each is made once.

    With ``is_repeated`` compiled loops make it, for a search.  Raises InvalidSchedule when the ranks wait for
    each other.
    """

    def __init__(self, schedule: Schedule, is_repeated: bool = False) -> None:
        self.timer = ScheduleTimer(schedule, is_repeated)

    @cached_property
    def in_flight(self) -> InFlight:
        """The activations in flight."""
        return InFlight(self.timer.walk.program)

    @cached_property
    def peak_messages(self) -> tuple[int, ...]:
        """The most message buffers that each rank holds at one time."""
        return most_buffers(self.timer.walk)


def placement_of(name: str, ranks: int, chunks: int, splits_head: bool = False) -> Placement:
    """Return where schedule ``name`` puts ``ranks`` x ``chunks`` stages, and whether these split the head.

    Raises ValueError for an unknown name and for chunks that the schedule does not accept.
    """
    if ranks == 1 or not catalog.abilities(name).flushes:
        return linear(ranks)
    return replace(catalog.entry(name).placement(ranks, chunks), splits_head=splits_head)


def _prepared(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    splits_head: bool = False,
    options: tuple[Option, ...] = (),
    is_repeated: bool = True,
) -> Prepared:
    """Return schedule ``name``, prepared; ValueError for sizes that it cannot be built for.

    With ``splits_head`` all ranks, of which there are several, split the head; ``options`` are those of
    features.
    """
    sizes = name, ranks, microbatches, chunks
    request = of_sizes(*sizes, splits_head=splits_head, options=options)
    return Prepared(make(request, is_proved=True).schedule, is_repeated)


program = lru_cache(maxsize=512)(partial(_prepared, is_repeated=False))
"""Programs that are prepared for few estimates."""

whole_program = lru_cache(maxsize=128)(_prepared)
"""The programs of whole steps, of which a search goes back to the latest only."""

short_program = lru_cache(maxsize=4096)(_prepared)
"""The programs of a few microbatches, which many candidates of a search have in common."""
