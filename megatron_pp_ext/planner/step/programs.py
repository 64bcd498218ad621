"""Schedules prepared for the estimates of time and memory; each is built once."""

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Protocol

from megatron_pp_ext.planner.step.action_arrays import action_arrays
from megatron_pp_ext.planner.step.activation_peaks import InFlight
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.names import NO_PIPELINE
from megatron_pp_ext.schedule.placement import Placement, linear
from megatron_pp_ext.schedule.simulate import peak_messages
from megatron_pp_ext.schedule.timing import CriticalPath, ScheduleTimer, Span
from megatron_pp_ext.schedule.vocabulary import share


class Timer(Protocol):
    """What times a schedule with the costs of its stages."""

    def spans(self, costs: Costs) -> tuple[Span, ...]:
        """Return every rank's span."""

    def critical_path(self, costs: Costs) -> CriticalPath:
        """Return the critical path."""


class Prepared(Protocol):
    """A schedule with all that an estimate derives from it: its timer, and what its ranks keep."""

    @property
    def timer(self) -> Timer:
        """The schedule's timer."""

    @property
    def in_flight(self) -> InFlight:
        """The activations in flight."""

    @property
    def peak_messages(self) -> tuple[int, ...]:
        """The most message buffers that each rank holds at one time."""


class Program:
    """A schedule that is prepared for few estimates; ``search.array_program`` prepares them for many."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    @cached_property
    def in_flight(self) -> InFlight:
        """The activations in flight."""
        return InFlight(self._schedule.placement, action_arrays(self._schedule.orders))

    @cached_property
    def timer(self) -> ScheduleTimer:
        """The schedule's timer."""
        return ScheduleTimer(self._schedule)

    @cached_property
    def peak_messages(self) -> tuple[int, ...]:
        """The most message buffers that each rank holds at one time."""
        return peak_messages(self._schedule)


def placement_of(name: str, ranks: int, chunks: int, shares_vocabulary: bool = False) -> Placement:
    """Return where schedule ``name`` puts ``ranks`` x ``chunks`` stages, and a vocabulary that ranks share.

    Raises ValueError for an unknown name and for chunks that the schedule does not accept.
    """
    if ranks == 1 or not catalog.abilities(name).flushes:
        return linear(ranks)
    return replace(catalog.entry(name).placement(ranks, chunks), shares_vocabulary=shares_vocabulary)


@lru_cache(maxsize=512)
def program(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    shares_vocabulary: bool = False,
    is_paired: bool = False,
) -> Program:
    """Return schedule ``name``, prepared for few estimates; the rest is as for ``scheduled``."""
    return Program(scheduled(name, ranks, microbatches, chunks, shares_vocabulary, is_paired))


def scheduled(
    name: str, ranks: int, microbatches: int, chunks: int, shares_vocabulary: bool, is_paired: bool
) -> Schedule:
    """Return schedule ``name``; ValueError for sizes that it cannot be built for.

    With ``shares_vocabulary`` all ranks, of which there are several, share the vocabulary; with ``is_paired``
    forwards and backwards run in pairs, for schedules that have them.  The schedule is not checked: the tests
    have proved every one of the catalogue.
    """
    if ranks == 1:
        alone = (Action(0, kind, m) for m in range(microbatches) for kind in (Kind.F, Kind.B))
        return Schedule(NO_PIPELINE, linear(1), microbatches, (tuple(alone),))
    build = catalog.entry(catalog.abilities(name).order or name).build
    if shares_vocabulary:
        return share(lambda count: build(ranks, count, chunks), microbatches)
    return build(ranks, microbatches, chunks, is_paired)
