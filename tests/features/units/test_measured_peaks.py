"""Ranks keep what the plan of a step in units of unlike length says, to the byte."""

import pytest

from megatron_pp_ext.features.units.plan import Planner
from megatron_pp_ext.features.units.rates import LengthCosts, StageRates
from megatron_pp_ext.schedule.placement import Placement, linear, v
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.ranks import run_ranks
from tests.support.unit_stages import steps_of

RANKS = 4
DOCUMENTS = [[9000, 300, 40], [52000], [700] * 6, [20000, 5000], [6000, 6000], [800, 12000], [31000], [4000]]


def planner(placement: Placement) -> Planner:
    """A planner whose stages keep 3 bytes of a token, of which I gives back 1."""
    rate = StageRates((1.0, 1.0, 1.0), (1e-4, 2.5e-4, 0.0), activation=3.0, released=1.0)
    return Planner(placement, LengthCosts((rate,) * placement.stages))


@pytest.mark.parametrize("shape", [v, linear])
def test_peaks_are_those_of_the_plan(shape: type[Placement]) -> None:
    placement = shape(RANKS)
    one, cases = planner(placement), []
    for most in (52_000, 90_000):
        plan = one.plan(one.cut(DOCUMENTS, 4096), limits=[3.0 * placement.chunks * most] * RANKS)
        cases.append((plan.schedule, one.costs(plan.units), 0.0))
    found = run_ranks(steps_of, RANKS, cases, 0)
    for number, (schedule, costs, _) in enumerate(cases):
        planned = simulate(schedule, costs).peak_memory
        assert [of_rank[number][1] for of_rank in found] == [round(peak) for peak in planned]
