"""The plan of a step: list scheduling, again and again, and the orders of all ranks.

What limits the search is a number of passes and never a clock, so that all ranks find the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import numpy as np

from megatron_pp_ext.compiler.compile import InfeasibleLimit
from megatron_pp_ext.features.lengths.orders import heaviest_first, light_heavy_light
from megatron_pp_ext.features.slices.bounds import lower_bound
from megatron_pp_ext.features.slices.climbing import CHANGES, Climb, climbed
from megatron_pp_ext.features.slices.cuts import ordered
from megatron_pp_ext.features.slices.problem import (
    ROUNDING,
    Chains,
    Integers,
    Problem,
    Ranks,
    Where,
    Work,
    state_of,
)
from megatron_pp_ext.features.slices.units import Units
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.without_collection import without_collection

BUDGET = 0.05
"""The seconds of one core that a search may take by default."""

ACTIONS_PER_SECOND = 5e6
"""How many actions one core lists in a second, at least."""

SECONDS_OF_AN_ACTION = 0.5e-6
"""The seconds of one core for what a plan makes of each action besides listing it."""

NAME = "sliced"
"""The name of schedules that are planned for units."""

_PACES = 0.0, 0.3, 0.5, 0.2, 0.4
"""The paces at which chains enter, the best on average first."""

_NEAR = 1.0005
"""A step within this factor of the lower bound is not searched further."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a step: its ``units`` in their forward order, and the order of all actions.

    ``seconds`` is the simulated step, and ``lower_bound`` one that no order of these units is below.
    """

    units: Units
    schedule: Schedule
    seconds: float
    lower_bound: float


class Search:
    """The search for the shortest step of ``units``, of which stages do this ``work``.

    ``limits`` are what each rank may keep, in the unit of ``work.kept``.  InfeasibleLimit where a rank cannot
    keep the longest document.
    """

    def __init__(self, units: Units, work: Work, placement: Placement, limits: Sequence[float]) -> None:
        self.units, self._placement = units, placement
        where = Where(
            np.array([placement.rank_of(stage) for stage in range(placement.stages)]),
            np.array([placement.stages_of(rank) for rank in range(placement.ranks)]),
        )
        first = np.array([chain.start for chain in units.chains])
        kept = np.add.reduceat(work.kept, first, axis=1)[where.stages_of].sum(axis=1)
        each = work.seconds[: 2 + work.splits].sum(axis=0)
        seconds = np.add.reduceat(each.sum(axis=0), first) / placement.ranks
        chains = Chains(first, np.array([len(chain) for chain in units.chains]), seconds, kept)
        bounded = np.array(limits, float) * (1 + ROUNDING)
        ranks = Ranks(bounded, kept.max(axis=1), each.sum(axis=1)[where.stages_of].sum(axis=1))
        self._problem = Problem(work, where, chains, ranks)
        self._costs = [float(one) for one in seconds]
        for rank, (needed, limit) in enumerate(zip(ranks.largest, limits, strict=True)):
            if needed > bounded[rank]:
                raise InfeasibleLimit(
                    f"the memory limit {limit:g} of rank {{rank}} is infeasible, it must keep the longest "
                    f"document's activations of all its stages: raise it to at least {needed:g}",
                    rank,
                )

    @property
    def rule(self) -> list[int]:
        """The order of the chains whose work rises up to the middle and falls from there on."""
        return light_heavy_light(self._costs)

    def by_rule(self) -> float:
        """Return the step with the chains in the order of ``rule``, at the best pace."""
        return self._found(len(_PACES))[0]

    @cached_property
    def lower_bound(self) -> float:
        """A makespan that no order is below."""
        return lower_bound(self._problem)

    def planned(self, budget: float = BUDGET) -> Plan:
        """Return the shortest plan that is found in ``budget`` seconds of a core."""
        actions = self._problem.work.kept.size * (2 + self._problem.work.splits)
        passes = max(
            len(_PACES), int((budget - actions * SECONDS_OF_AN_ACTION) * ACTIONS_PER_SECOND / actions)
        )
        with without_collection():
            seconds, order, numbers = self._found(passes)
            units = ordered(self.units, order)
            schedule = self._schedule(units, numbers)
        return Plan(units, schedule, seconds, min(self.lower_bound, seconds))

    def _found(self, passes: int) -> tuple[float, list[int], Integers]:
        """Return the shortest step of so many ``passes``, the order of its chains and that of all actions."""
        rule, work, ranks = self.rule, self._problem.work, self._placement.ranks
        orders = [*repeat(rule, len(_PACES)), heaviest_first(self._costs), list(range(len(rule)))][:passes]
        paces = [*_PACES, 0.0, 0.0][:passes]
        draws = np.random.default_rng(0).random((passes - len(orders), 3))
        if len(set(self._costs)) == 1:
            draws[:, 0] = 1 - draws[:, 0] / CHANGES  # equal chains do not move: all changes are of gaps
        floor = self.lower_bound * _NEAR
        found = Climb(np.array(orders), np.array(paces), draws, floor, np.array(rule), np.zeros(len(rule)))
        actions = np.empty((ranks, work.kept.size * (2 + work.splits) // ranks), np.int64)
        seconds = climbed(self._problem, found, state_of(self._problem), actions)
        assert np.isfinite(seconds), "the reservation lets every order go on"
        return seconds, found.order.tolist(), actions

    def _schedule(self, units: Units, numbers: Integers) -> Schedule:
        placement = self._placement
        kinds = (Kind.F, Kind.I, Kind.W) if self._problem.work.splits else (Kind.F, Kind.B)
        count = len(units)
        stage_kind, unit = np.divmod(numbers, count)
        kind, stage = np.divmod(stage_kind, placement.stages)
        orders = tuple(
            tuple(
                map(
                    tuple.__new__,
                    repeat(Action),
                    zip(stages, map(kinds.__getitem__, codes), own, strict=True),
                )
            )
            for stages, codes, own in zip(stage.tolist(), kind.tolist(), unit.tolist(), strict=True)
        )
        return Schedule(NAME, placement, count, orders, units=units.names)
