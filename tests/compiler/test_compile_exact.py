"""The compiler and its bound against small pipelines that are solved to proved optimality."""

from math import ceil
from random import Random

import pytest

pytest.importorskip("ortools", reason="the exact solver is OR-tools: install the dev extra")

from megatron_pp_ext.compiler.bounds import lower_bound
from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.compiler.limits import least_limits
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear, loop, v, wave
from tests.support.exact import shortest
from tests.support.tiers import first

UNIT, UNEQUAL = (1, 1, 1, 0), (10, 11, 7, 1)


pytestmark = pytest.mark.usefixtures("own_cache")


def judged(placement, microbatches, costs, limit):
    """Return the compiled makespan and the optimum, which must be proved and not below the bound."""
    compiled = compile_schedule(placement.ranks, microbatches, costs, limit, placements=[placement])
    limits = [limit] * placement.ranks
    found = compiled.timeline.makespan
    bound, optimum = shortest(placement, microbatches, costs, limits, effort=60, hint=found)
    assert bound == optimum
    assert compiled.lower_bound <= optimum <= found
    return found, optimum


@pytest.mark.parametrize(
    ("placement", "m", "limit", "times"),
    [
        (linear(3), 4, 2, UNIT),
        (linear(4), 6, 3, UNEQUAL),
        (v(2), 4, 2, UNIT),
        *first(
            0,
            [
                (v(2), 4, 3, UNEQUAL),
                (linear(4), 6, 3, UNIT),
                (linear(4), 6, 5, UNEQUAL),
                (v(2), 4, 2, UNEQUAL),
                (v(3), 3, 3, UNIT),
                (v(2), 6, 4, UNEQUAL),
                (v(3), 3, 3, UNEQUAL),
                (v(3), 3, 4, UNEQUAL),
                (v(3), 4, 6, UNEQUAL),
                (v(4), 4, 5, UNIT),
            ],
        ),
    ],
)
def test_optimal_on_small_pipelines(placement, m, limit, times):
    forward, i, w, hop = times
    costs = Costs.uniform(placement, forward=forward, input_gradient=i, weight_gradient=w, hop=hop)
    found, optimum = judged(placement, m, costs, limit)
    assert found == optimum


@pytest.mark.wide
def test_optimal_with_unequal_stages_that_release_early():
    """An embedding in front, an output layer behind, and half of the activations given back by I."""
    stages = (StageCosts(5, 4, 3, 4, 2), *[StageCosts(4, 5, 3, 4, 2)] * 4, StageCosts(7, 8, 4, 6, 2))
    for limit in (10, 14):
        found, optimum = judged(v(3), 3, Costs(stages, 1), limit)
        assert found <= 1.02 * optimum


@pytest.mark.parametrize("takes_more", [False, True])
@pytest.mark.parametrize("seed", range(16))
def test_no_optimum_is_below_the_bound(seed, takes_more):
    """Random costs and limits, most of them scarce: none of the arguments may promise too much.

    An I may take more memory than its forward kept, for as long as it runs or until the W.
    """
    random = Random(seed)
    shapes = linear(2), linear(3), linear(4), v(2), v(3), v(4), loop(2, 2), loop(3, 2), wave(2, 3), wave(2, 4)
    placement = random.choice(shapes)
    microbatches = random.randint(1, 6 if placement.stages <= 4 else 4)

    def stage():
        times, kept = [random.randint(1, 6) for _ in range(3)], random.randint(1, 3)
        released = random.choice([0, 0, kept // 2, *([-1, -kept] if takes_more else [])])
        return StageCosts(*times, kept, released, workspace=random.choice([0, 1, 2]) if takes_more else 0)

    one = stage()
    stages = [one if seed % 3 else stage() for _ in range(placement.stages)]
    costs = Costs(tuple(stages), random.choice([0, 1, 2]))
    least = least_limits(costs, placement, microbatches)
    most = max(stage.growth(Kind.I) for stage in stages)
    limits = [ceil(limit) + random.choice([0, most]) + random.choice([0, 0, 1, 2, 4]) for limit in least]
    _, reached = shortest(placement, microbatches, costs, limits, effort=1)
    assert lower_bound(placement, microbatches, costs, limits) <= reached * (1 + 1e-9)
