"""Ranks launch by the times of an order: no sender waits for a receive that is posted too late."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from megatron_pp_ext.features.lengths.length_costs import LengthCosts
from megatron_pp_ext.features.lengths.microbatches import Microbatches
from megatron_pp_ext.features.lengths.plan import Plan, Planner
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.unit_costs import UnitCosts
from tests.launches.test_cannot_hang import assert_finishes_strictly
from tests.support.few_sends import step_seconds

FAMILIES = "1f1b", "interleaved", "zb-h1", "v-half", "gpipe"
RANKS, MICROBATCHES = 4, 32


def costs_of(seed: int, chunks: int) -> UnitCosts:
    """Microbatches of very unlike length, as in training on long contexts."""
    random = Random(seed)
    documents = [
        [min(131_072, 200 + int(random.lognormvariate(7, 2))) for _ in range(random.randint(1, 8))]
        for _ in range(MICROBATCHES)
    ]
    step = Microbatches.of(documents)
    mean = sum(step.tokens) / MICROBATCHES
    return LengthCosts.with_attention(Costs.per_rank(RANKS, chunks), mean).of(step)


@cache
def planned(family: str, seed: int) -> tuple[Plan, UnitCosts]:
    """A plan by search with the times of its microbatches, and their costs in its order."""
    planner = Planner(catalog.build(family, RANKS, MICROBATCHES))
    costs = costs_of(seed, planner.schedule.placement.chunks)
    plan = planner.timed(planner.plan(costs, "search"), costs)
    return plan, costs.ordered(plan.order)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_takes_what_is_planned(family: str, seed: int) -> None:
    plan, costs = planned(family, seed)
    assert step_seconds(plan.schedule, costs) == pytest.approx(plan.seconds, rel=0.005)


def test_equal_times_would_let_senders_wait() -> None:
    """Where all forwards come first, many messages are under way."""
    steps = [planned("gpipe", seed) for seed in range(3)]
    as_equal = [step_seconds(replace(plan.schedule, durations=()), costs) for plan, costs in steps]
    assert max(alike / plan.seconds for alike, (plan, _) in zip(as_equal, steps, strict=True)) > 1.05


@pytest.mark.parametrize("family", FAMILIES)
def test_announced_shapes_would_let_receivers_wait(family: str) -> None:
    plan, costs = planned(family, 0)
    assert step_seconds(plan.schedule, costs, announces=True) > 1.05 * plan.seconds


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plans_cannot_hang(family: str) -> None:
    schedule = planned(family, 1)[0].schedule
    assert schedule.durations
    ranks = [[plan_rank(schedule, rank)] for rank in range(schedule.ranks)]
    assert_finishes_strictly(ranks, schedule.name)


def test_equal_microbatches_have_the_plan_of_the_schedule() -> None:
    planner = Planner(catalog.build("zb-h1", 2, 4))
    costs = LengthCosts.with_attention(Costs.per_rank(2), 1).of(Microbatches.of([[5]] * 4))
    plan = planner.plan(costs, "rule")
    assert planner.timed(plan, costs).schedule is planner.schedule
