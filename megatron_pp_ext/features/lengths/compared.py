"""The orders of other frameworks next to those planned here, for the same step."""

from collections.abc import Sequence

from megatron_pp_ext.features.lengths import orders
from megatron_pp_ext.features.lengths.plan import BUDGET, Plan, Planner
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from megatron_pp_ext.schedule.unit_costs import UnitCosts

GIVEN, RULE, SEARCH = "given", "by rule", "searched"
NAMES = (GIVEN, *orders.ELSEWHERE, RULE, SEARCH)
"""The names of the orders, ours last."""


def side_by_side(
    planner: Planner,
    costs: UnitCosts,
    budget: float = BUDGET,
    limits: Sequence[float] | None = None,
) -> dict[str, Plan]:
    """Return the plan with each order, by its name; ``limits`` bind those planned here.

    Raises what ``Planner.plan`` raises.
    """
    work = planner.work(costs)
    plans = {GIVEN: planner.plan(costs, "given")}
    for name, order in orders.ELSEWHERE.items():
        plans[name] = planner.in_order(costs, order(work, costs.tokens))
    plans[RULE] = planner.plan(costs, "rule", budget=budget, limits=limits)
    plans[SEARCH] = planner.plan(costs, "search", budget=budget, limits=limits)
    return plans


def timeline(plan: Plan, costs: UnitCosts) -> Timeline:
    """Return the simulated step of ``plan``, whose microbatches have ``costs`` in the order of the data."""
    return simulate(plan.schedule, costs.ordered(plan.order))


def peak_tokens(step: Timeline) -> float:
    """Return the tokens whose activations the fullest rank keeps at most.

    Activations of part of a rank's stages count as that part of their tokens.
    """
    costs = step.costs
    assert isinstance(costs, UnitCosts)
    return max(step.peak_microbatches) * sum(costs.tokens) / len(costs.tokens)


def over_work(step: Timeline) -> float:
    """Return the step as a multiple of the work of the busiest rank, which no order falls below."""
    placement, costs = step.schedule.placement, step.costs
    busy = [0.0] * placement.ranks
    for events, rank in zip(step.events, range(placement.ranks), strict=True):
        busy[rank] = sum(costs.seconds(action) for action, _, _ in events)
    return step.makespan / max(busy)
