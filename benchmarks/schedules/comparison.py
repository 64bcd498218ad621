"""Costs and verdicts, which all tables of compiled schedules share."""

from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement

Times = tuple[float, float, float, float]
"""F, I, W and hop of every stage."""
UNIT: Times = (1, 1, 1, 0)
UNEQUAL: Times = (10, 11, 7, 1)

FEWER_TRIALS = 300
"""Fewer than the compiler's default, for tables of some hundred points."""


def costs_of(placement: Placement, times: Times) -> Costs:
    """Return ``times`` for every stage of ``placement``."""
    forward, i, w, hop = times
    return Costs.uniform(placement, forward=forward, input_gradient=i, weight_gradient=w, hop=hop)


def verdict(makespan: float, goal: float) -> str:
    """Return how ``makespan`` compares with the one to reach."""
    if makespan < goal * (1 - 1e-9):
        return f"{100 * (1 - makespan / goal):.1f}% shorter"
    return "met" if makespan <= goal * (1 + 1e-9) else f"**{100 * (makespan / goal - 1):.1f}% longer**"
