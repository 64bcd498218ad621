"""Steps of unlike microbatches under ``flex`` and ``auto``: each has a plan within its limit in tokens.

What the compiler finds keeps the limit for equal microbatches.  Where these differ, a step takes an order of
them that keeps it too, and, where there is none, another order of actions (``lengths.within``).
"""

from dataclasses import replace

from megatron_pp_ext.compiler.limits import without_messages
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.lengths.megatron.ordered_data import SEARCHING, Ordered
from megatron_pp_ext.features.lengths.ordering import Ordering
from megatron_pp_ext.features.lengths.plan import BUDGET, Plan
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.step_parts import Step
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.unit_costs import UnitCosts


class WithinLimit(Ordered):
    """Plans each step within the limit of a compiled schedule."""

    def __init__(self, pipeline: Pipeline, ordering: Ordering) -> None:
        super().__init__(pipeline, ordering)
        self._request = pipeline.request
        self._measures = catalog.abilities(pipeline.request.schedule).measures_memory

    def plan(self, step: Step, costs: UnitCosts) -> Plan:
        """See ``Ordered``.  Under ``auto`` the first step is as given: nobody knows of its memory."""
        if self._measures and not step.free:
            return self.planner(step).plan(costs, "given")
        request = replace(
            self._request, microbatches=len(costs.units), ordinary=None, free=tuple(step.free) or None
        )
        limits = limits_of(request, costs, step.placement)
        return self.planner(step).plan(costs, self.ordering.how, budget=SEARCHING * BUDGET, limits=limits)


def limits_of(request: Request, costs: UnitCosts, placement: Placement) -> tuple[float, ...]:
    """Return what each rank may keep of activations in a step with these ``costs``.

    A fraction is one of what 1F1B keeps in this step.  It, and what ``auto`` has free, are raised to what the
    largest microbatch needs: no run is to end for one that is larger than others.  An amount stays.
    """
    budget = request.budget(costs)
    limits = budget.ranks
    if budget.holds_messages:
        limits = without_messages(placement, request.microbatches, costs, limits)
        if not catalog.abilities(request.schedule).measures_memory:
            return limits
    return tuple(map(max, limits, _largest(costs, placement)))


def _largest(costs: UnitCosts, placement: Placement) -> list[float]:
    """Return what each rank keeps of the largest microbatch."""
    return [
        max(sum(unit.stages[stage].activation for stage in placement.stages_of(rank)) for unit in costs.units)
        for rank in range(placement.ranks)
    ]
