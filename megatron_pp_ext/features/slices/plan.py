"""The plan of a step of units: how sequences are cut, the order of their chains, and that of all actions.

Plans take the same on every rank: what limits the search is a number of passes, and never a clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from megatron_pp_ext.compiler.compile import InfeasibleLimit
from megatron_pp_ext.features.lengths.costs import EQUAL_AT, LengthCosts
from megatron_pp_ext.features.lengths.orders import heaviest_first, light_heavy_light
from megatron_pp_ext.features.slices.bounds import lower_bound
from megatron_pp_ext.features.slices.costs import unit_costs, work_of
from megatron_pp_ext.features.slices.cuts import By, cut, ordered
from megatron_pp_ext.features.slices.listing import Chains, Floats, Integers, Policy, Where, Work, listed
from megatron_pp_ext.features.slices.units import Units
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.unit_costs import UnitCosts

BUDGET = 0.05
"""The seconds of one core that a plan may take by default."""

ACTIONS_PER_SECOND = 5e6
"""How many actions one core lists in a second, at least."""

SMALLEST, LARGEST = 512, 65_536
"""The sizes of units in tokens between which ``auto`` chooses, by factors of 2."""

NAME = "sliced"
"""The name of schedules that are planned for units."""

_POLICIES = (Policy(0.0, 0.0), Policy(0.0, 0.6), Policy(0.5, 0.0))


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a step: its ``units`` in their forward order, and the order of all actions.

    ``seconds`` is the simulated step, and ``lower_bound`` one that no order of these units is below.
    """

    units: Units
    schedule: Schedule
    costs: UnitCosts
    seconds: float
    lower_bound: float


class Planner:
    """Plans steps on ``placement`` whose stages have the costs of ``rates``.

    ``overhead`` are the tokens that a unit costs on top of its own (``costs.unit_costs``).
    """

    def __init__(
        self,
        placement: Placement,
        rates: LengthCosts,
        *,
        splits_backward: bool = True,
        overhead: float = 0.0,
        equal_at: float = EQUAL_AT,
    ) -> None:
        if len(rates.stages) != placement.stages:
            raise ValueError(
                f"there are costs of {len(rates.stages)} stages, but the placement has {placement.stages}: "
                "give one for each"
            )
        self.placement, self.rates, self.splits_backward = placement, rates, splits_backward
        self.overhead, self.equal_at = overhead, equal_at
        ranks = range(placement.ranks)
        self._where = Where(
            np.array([placement.rank_of(stage) for stage in range(placement.stages)]),
            np.array([placement.stages_of(rank) for rank in ranks]),
        )

    def plan(
        self,
        documents: Sequence[Sequence[int]],
        slice_tokens: int | None,
        limits: Sequence[float],
        *,
        by: By = "tokens",
        budget: float = BUDGET,
    ) -> Plan:
        """Return the plan of a step whose microbatches have these ``documents``.

        ``slice_tokens`` are the most of a unit; None chooses them by the simulated step.  ``limits`` are what
        each rank may keep, in the unit of ``StageRates.activation`` times tokens.  Raises InfeasibleLimit
        where a rank cannot keep the longest document.
        """
        if slice_tokens is None:
            longest = max(max(lengths) for lengths in documents)
            sizes = [SMALLEST << step for step in range((LARGEST // SMALLEST).bit_length())]
            sizes = [size for size in sizes if size < 2 * longest] or sizes[:1]
        else:
            sizes = [slice_tokens]
        searches = [
            _Search(self, cut(documents, size, by, self.equal_at), limits) for size in sizes
        ]
        if len(searches) > 1:
            # The rule ranks sizes; small ones, which take longest to plan, are not all searched.
            searches = sorted(searches, key=lambda search: search.by_rule())[:1]
        (search,) = searches
        return search.planned(budget)

    def plan_units(self, units: Units, limits: Sequence[float], *, budget: float = BUDGET) -> Plan:
        """Return the plan for ``units``, whose chains may get another order; see ``plan``."""
        return _Search(self, units, limits).planned(budget)


class _Search:
    """The search for an order of the chains of ``units``."""

    def __init__(self, planner: Planner, units: Units, limits: Sequence[float]) -> None:
        self._planner, self.units = planner, units
        self._work = work_of(
            units, planner.rates, planner.placement, planner.splits_backward, planner.overhead
        )
        self._limits = np.array(limits, float)
        total = self._work.seconds[: 2 + self._work.splits].sum(axis=(0, 1))
        self._costs = [float(total[chain.start : chain.stop].sum()) for chain in units.chains]
        self._require_room()

    def _require_room(self) -> None:
        """Raise InfeasibleLimit where the longest document alone does not fit."""
        firsts = [chain.start for chain in self.units.chains]
        of_chains = np.add.reduceat(self._work.kept, firsts, axis=1)
        for rank, stages in enumerate(self._planner._where.stages_of):
            needed = float(of_chains[stages].sum(axis=0).max())
            if needed > self._limits[rank]:
                raise InfeasibleLimit(
                    f"the memory limit {self._limits[rank]:g} of rank {rank} is infeasible, it must keep the "
                    f"longest document's activations of all its stages: raise it to at least {needed:g}"
                )

    def by_rule(self) -> float:
        """Return the step with the chains light-heavy-light."""
        return self._listed(light_heavy_light(self._costs), _POLICIES[0])[0]

    def planned(self, budget: float) -> Plan:
        """Return the shortest plan that is found in ``budget`` seconds of a core."""
        actions = self._work.kept.size * (2 + self._work.splits)
        passes = max(1, int(budget * ACTIONS_PER_SECOND / actions))
        best, chosen, policy = np.inf, list(range(len(self._costs))), _POLICIES[0]
        for order, one in self._tried(passes):
            seconds, _ = self._listed(order, one)
            if seconds < best:
                best, chosen, policy = seconds, order, one
        best, chosen = self._climbed(best, chosen, policy, passes - self._known(passes))
        seconds, numbers = self._listed(chosen, policy)
        units = ordered(self.units, chosen)
        planner = self._planner
        costs = unit_costs(units, planner.rates, planner.overhead)
        bound = lower_bound(self._work, planner._where, self._chains(range(len(self._costs)))[0])
        return Plan(units, self._schedule(units, numbers), costs, seconds, min(bound, seconds))

    def _known(self, passes: int) -> int:
        return min(passes, 4 + len(_POLICIES) - 1)

    def _tried(self, passes: int) -> Iterator[tuple[list[int], Policy]]:
        """Yield the orders by rules, the most promising first, and other policies for that one."""
        rule = light_heavy_light(self._costs)
        heaviest = heaviest_first(self._costs)
        known = [
            (rule, _POLICIES[0]),
            *((rule, policy) for policy in _POLICIES[1:]),
            (heaviest, _POLICIES[0]),
            (list(range(len(rule))), _POLICIES[0]),
            (heaviest[::-1], _POLICIES[0]),
        ]
        yield from known[: self._known(passes)]

    def _climbed(
        self, best: float, order: list[int], policy: Policy, passes: int
    ) -> tuple[float, list[int]]:
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
        placement = self._planner.placement
        each = placement.chunks * len(numbers) * (2 + work.splits)
        actions = np.full((placement.ranks, each), -1)
        peak: Floats = np.zeros(placement.ranks)
        seconds = listed(moved, self._planner._where, chains, self._limits, policy, actions, peak)
        assert np.isfinite(seconds), "the reservation lets every order go on"
        return seconds, actions

    def _schedule(self, units: Units, numbers: Integers) -> Schedule:
        placement = self._planner.placement
        kinds = (Kind.F, Kind.I, Kind.W) if self._planner.splits_backward else (Kind.F, Kind.B)
        count = len(units)
        stage_kind, unit = np.divmod(numbers, count)
        kind, stage = np.divmod(stage_kind, placement.stages)
        orders = tuple(
            tuple(map(Action, stages, map(kinds.__getitem__, codes), own))
            for stages, codes, own in zip(stage.tolist(), kind.tolist(), unit.tolist(), strict=True)
        )
        return Schedule(NAME, placement, count, orders)
