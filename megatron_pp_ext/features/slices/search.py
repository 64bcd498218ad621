"""The order of the chains of a step, and that of all its actions: list scheduling, again and again.

What limits the search is a number of passes and never a clock, so that all ranks find the same order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from megatron_pp_ext.compiler.compile import InfeasibleLimit
from megatron_pp_ext.features.lengths.orders import heaviest_first, light_heavy_light
from megatron_pp_ext.features.slices.bounds import lower_bound
from megatron_pp_ext.features.slices.cuts import ordered
from megatron_pp_ext.features.slices.listing import Chains, Floats, Integers, Policy, Where, Work, listed
from megatron_pp_ext.features.slices.units import Units
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.placement import Placement

BUDGET = 0.05
"""The seconds of one core that a search may take by default."""

ACTIONS_PER_SECOND = 5e6
"""How many actions one core lists in a second, at least."""

SECONDS_OF_AN_ACTION = 0.7e-6
"""The seconds of one core for what a plan makes of each action besides listing it."""

NAME = "sliced"
"""The name of schedules that are planned for units."""

_POLICIES = (Policy(0.0, 0.0), Policy(0.0, 0.6), Policy(0.5, 0.0))
"""What ranks may prefer, the best on average first."""


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
    """The search for an order of the chains of ``units``, of which stages do this ``work``.

    ``limits`` are what each rank may keep, in the unit of ``work.kept``.  InfeasibleLimit where a rank cannot
    keep the longest document.
    """

    def __init__(self, units: Units, work: Work, placement: Placement, limits: Sequence[float]) -> None:
        self.units, self._work, self._placement = units, work, placement
        self._limits = np.array(limits, float)
        self._where = Where(
            np.array([placement.rank_of(stage) for stage in range(placement.stages)]),
            np.array([placement.stages_of(rank) for rank in range(placement.ranks)]),
        )
        total = self._work.seconds[: 2 + self._work.splits].sum(axis=(0, 1))
        self._costs = [float(total[chain.start : chain.stop].sum()) for chain in units.chains]
        self._require_room()

    def _require_room(self) -> None:
        """Raise InfeasibleLimit where the longest document alone does not fit."""
        firsts = [chain.start for chain in self.units.chains]
        of_chains = np.add.reduceat(self._work.kept, firsts, axis=1)
        for rank, stages in enumerate(self._where.stages_of):
            needed = float(of_chains[stages].sum(axis=0).max())
            if needed > self._limits[rank]:
                raise InfeasibleLimit(
                    f"the memory limit {self._limits[rank]:g} of rank {{rank}} is infeasible, it must keep "
                    f"the longest document's activations of all its stages: raise it to at least {needed:g}",
                    rank,
                )

    @property
    def rule(self) -> list[int]:
        """The order of the chains whose work rises up to the middle and falls from there on."""
        return light_heavy_light(self._costs)

    def by_rule(self) -> float:
        """Return the step with the chains in the order of ``rule``."""
        return self._listed(self.rule, _POLICIES[0])[0]

    @property
    def lower_bound(self) -> float:
        """A makespan that no order is below, whatever the limits."""
        return lower_bound(self._work, self._where, self._chains(range(len(self._costs)))[0])

    def planned(self, budget: float = BUDGET) -> Plan:
        """Return the shortest plan that is found in ``budget`` seconds of a core."""
        actions = self._work.kept.size * (2 + self._work.splits)
        passes = max(1, int((budget - actions * SECONDS_OF_AN_ACTION) * ACTIONS_PER_SECOND / actions))
        best, chosen, policy = np.inf, list(range(len(self._costs))), _POLICIES[0]
        for order, one in self._tried(passes):
            seconds, _ = self._listed(order, one)
            if seconds < best:
                best, chosen, policy = seconds, order, one
        if len(set(self._costs)) > 1:
            best, chosen = self._climbed(best, chosen, policy, passes - self._known(passes))
        seconds, numbers = self._listed(chosen, policy)
        units = ordered(self.units, chosen)
        schedule = self._schedule(units, numbers)
        return Plan(units, schedule, seconds, min(self.lower_bound, seconds))

    def _known(self, passes: int) -> int:
        return min(passes, len(_POLICIES) + 3)

    def _tried(self, passes: int) -> Iterator[tuple[list[int], Policy]]:
        """Yield the orders by rules, the most promising first, and other policies for that one."""
        rule = self.rule
        heaviest = heaviest_first(self._costs)
        known = [
            (rule, _POLICIES[0]),
            *((rule, policy) for policy in _POLICIES[1:]),
            (heaviest, _POLICIES[0]),
            (list(range(len(rule))), _POLICIES[0]),
            (heaviest[::-1], _POLICIES[0]),
        ]
        yield from known[: self._known(passes)]

    def _climbed(self, best: float, order: list[int], policy: Policy, passes: int) -> tuple[float, list[int]]:
        """Return the best order that is found by moving a chain, or swapping two, at a time."""
        random, count = Random(0), len(order)
        if count < 2:
            return best, order
        for _ in range(passes):
            one, other = random.sample(range(count), 2)
            tried = list(order)
            if random.random() < 0.5:
                tried.insert(other, tried.pop(one))
            else:
                tried[one], tried[other] = tried[other], tried[one]
            seconds, _ = self._listed(tried, policy)
            if seconds <= best:
                best, order = seconds, tried
        return best, order

    def _chains(self, order: Sequence[int]) -> tuple[Chains, Integers]:
        """Return the chains in this order, and the units as they stand then."""
        spans = [self.units.chains[chain] for chain in order]
        sizes = np.array([len(span) for span in spans])
        ends = np.cumsum(sizes)
        begins = ends - sizes
        first = np.array([span.start for span in spans])
        here = np.arange(ends[-1])
        chain_of = np.repeat(np.arange(len(spans)), sizes)
        backwards = begins[chain_of] + ends[chain_of] - 1 - here
        return Chains(chain_of, backwards), first[chain_of] + here - begins[chain_of]

    def _listed(self, order: Sequence[int], policy: Policy) -> tuple[float, Integers]:
        chains, numbers = self._chains(order)
        work = self._work
        moved = Work(
            np.ascontiguousarray(work.seconds[:, :, numbers]),
            np.ascontiguousarray(work.kept[:, numbers]),
            np.ascontiguousarray(work.released[:, numbers]),
            work.delays,
            work.splits,
        )
        placement = self._placement
        each = placement.chunks * len(numbers) * (2 + work.splits)
        actions = np.full((placement.ranks, each), -1)
        peak: Floats = np.zeros(placement.ranks)
        seconds = listed(moved, self._where, chains, self._limits, policy, actions, peak)
        assert np.isfinite(seconds), "the reservation lets every order go on"
        return seconds, actions

    def _schedule(self, units: Units, numbers: Integers) -> Schedule:
        placement = self._placement
        kinds = (Kind.F, Kind.I, Kind.W) if self._work.splits else (Kind.F, Kind.B)
        count = len(units)
        stage_kind, unit = np.divmod(numbers, count)
        kind, stage = np.divmod(stage_kind, placement.stages)
        orders = tuple(
            tuple(map(Action, stages, map(kinds.__getitem__, codes), own))
            for stages, codes, own in zip(stage.tolist(), kind.tolist(), unit.tolist(), strict=True)
        )
        return Schedule(NAME, placement, count, orders, units=units.names)
