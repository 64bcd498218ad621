"""The plan of a step whose microbatches are of unlike length: how sequences are cut, and all orders."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_pp_ext.compiler.compile import InfeasibleLimit
from megatron_pp_ext.features.lengths.length_costs import LengthCosts
from megatron_pp_ext.features.slices.cuts import By, cut, ordered
from megatron_pp_ext.features.slices.options import SMALLEST
from megatron_pp_ext.features.slices.problem import ROUNDING
from megatron_pp_ext.features.slices.search import BUDGET, Plan, Search
from megatron_pp_ext.features.slices.shift import more, shifted
from megatron_pp_ext.features.slices.slice_costs import durations_of, unit_costs, work_of
from megatron_pp_ext.features.slices.units import Units
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.schedule.unit_costs import UnitCosts

LARGEST = 65_536
"""The most tokens of a unit that ``auto`` tries, from ``SMALLEST`` on by factors of 2."""


class Planner:
    """Plans steps on ``placement`` whose stages have the costs of ``rates``.

    ``overhead`` are the tokens that a unit costs on top of its own.  Slices end at a ``multiple`` of so many
    tokens, which divides all lengths.  A token stands for one of each of the ``rows`` of a batch.
    """

    def __init__(
        self,
        placement: Placement,
        rates: LengthCosts,
        *,
        splits_backward: bool = True,
        overhead: float = 0.0,
        multiple: int = 1,
        rows: int = 1,
    ) -> None:
        if len(rates.stages) != placement.stages:
            raise ValueError(
                f"there are costs of {len(rates.stages)} stages, but the placement has {placement.stages}: "
                "give one for each"
            )
        self.placement, self.rates, self.splits_backward = placement, rates, splits_backward
        self.overhead = overhead
        self._multiple, self._rows = multiple, rows

    def plan(
        self,
        documents: Sequence[Sequence[int]],
        slice_tokens: int | None,
        limits: Sequence[float],
        *,
        by: By = "cost",
        budget: float = BUDGET,
    ) -> Plan:
        """Return the plan of a step whose microbatches have these ``documents``.

        ``slice_tokens`` are the most of a unit; None chooses them (``chosen_tokens``).  ``limits`` are what
        each rank may keep, in the unit of ``StageRates.activation`` times tokens.  Raises InfeasibleLimit
        where a rank cannot keep the longest document.
        """
        if slice_tokens is None:
            slice_tokens = self.chosen_tokens(documents, limits, by)
        return self.plan_units(self.cut(documents, slice_tokens, by), limits, budget)

    def plan_units(self, units: Units, limits: Sequence[float], budget: float = BUDGET) -> Plan:
        """Return the plan of a step of ``units``; see ``plan``."""
        found = self._search(units, limits).planned(budget)
        return replace(found, schedule=self._timed(found.schedule, found.units))

    def cut(self, documents: Sequence[Sequence[int]], slice_tokens: int, by: By = "cost") -> Units:
        """Return the units of microbatches with these ``documents``, in the order of the data."""
        return cut(documents, slice_tokens, by, self.rates.equal_at, self._multiple, self._rows)

    def chosen_tokens(
        self, documents: Sequence[Sequence[int]], limits: Sequence[float], by: By = "cost"
    ) -> int:
        """Return the size of units whose step is shortest where chains go light-heavy-light.

        Small units fill the pipeline sooner and keep less, and their ``overhead`` makes the step longer.
        Raises InfeasibleLimit where a rank cannot keep the longest document.
        """
        found, refused = dict[int, float](), list[InfeasibleLimit]()
        for size in _sizes(documents):
            try:
                found[size] = self._search(self.cut(documents, size, by), limits).by_rule()
            except InfeasibleLimit as error:  # of a pack, or of the longest document
                refused.append(error)
        if not found:
            raise refused[0]
        return min(found, key=found.__getitem__)

    def least_limits(self, units: Units) -> list[float]:
        """Return the least that each rank may keep: the longest document, or the largest pack."""
        most = max(sum(units.tokens[number] for number in chain) for chain in units.chains)
        stages, placement = self.rates.stages, self.placement
        return [
            most * math.fsum(stages[stage].activation for stage in placement.stages_of(rank)) * (1 + ROUNDING)
            for rank in range(placement.ranks)
        ]

    def in_family(
        self,
        make: Callable[[int], Schedule],
        documents: Sequence[Sequence[int]],
        slice_tokens: int | None,
        by: By = "cost",
    ) -> Plan:
        """Return the plan whose actions have the order of a family (``shift``), and its memory.

        ``make`` makes the family's schedule for so many microbatches.  None as ``slice_tokens`` chooses those
        with the shortest step.
        """
        if slice_tokens is None:
            slice_tokens = self.chosen_in_family(make, documents, by)
        units, schedule = self.order_of_family(make, self.cut(documents, slice_tokens, by))
        seconds = simulate(schedule, self.costs(units)).makespan
        bound = self._search(units, self._no_limits).lower_bound
        return Plan(units, schedule, seconds, min(bound, seconds))

    def chosen_in_family(
        self, make: Callable[[int], Schedule], documents: Sequence[Sequence[int]], by: By = "cost"
    ) -> int:
        """Return the size of units whose step is shortest in the order of a family; see ``in_family``."""

        def seconds(size: int) -> float:
            units, schedule = self.order_of_family(make, self.cut(documents, size, by))
            return simulate(schedule, self.costs(units)).makespan

        return min(_sizes(documents), key=seconds)

    def order_of_family(self, make: Callable[[int], Schedule], units: Units) -> tuple[Units, Schedule]:
        """Return the units and the order of ``in_family``, in milliseconds: without their simulation."""
        units = ordered(units, self._search(units, self._no_limits).rule)
        return units, self._timed(shifted(make(len(units) + more(units)), units), units)

    def order_of_evaluation(self, make: Callable[[int], Schedule], units: Units) -> Schedule:
        """Return the order of the forwards of ``units``, which stay in theirs.

        ``make`` makes the schedule of an evaluation of so many microbatches.
        """
        return self._timed(replace(make(len(units)), units=units.names), units)

    def _timed(self, schedule: Schedule, units: Units) -> Schedule:
        """Return ``schedule`` with the times of its units, by which ranks launch."""
        durations = durations_of(units, self.rates, self.placement, self.overhead)
        return replace(schedule, durations=durations)

    @property
    def _no_limits(self) -> list[float]:
        return [math.inf] * self.placement.ranks

    def costs(self, units: Units) -> UnitCosts:
        """Return what actions of ``units`` cost, for ``simulate``."""
        return unit_costs(units, self.rates, self.overhead)

    def _search(self, units: Units, limits: Sequence[float]) -> Search:
        work = work_of(units, self.rates, self.placement, self.splits_backward, self.overhead)
        return Search(units, work, self.placement, limits)


def _sizes(documents: Sequence[Sequence[int]]) -> list[int]:
    """Return the sizes of units among which one is chosen."""
    longest = max(map(max, documents))
    sizes = [SMALLEST << step for step in range((LARGEST // SMALLEST).bit_length())]
    return [size for size in sizes if size < 2 * longest] or sizes[:1]
