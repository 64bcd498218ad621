"""Ranks launch by the times of a plan: no sender waits for a receive that is posted too late."""

from dataclasses import replace
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.plan import Plan, Planner, Template
from megatron_pp_ext.features.units.rates import LengthCosts, StageRates
from megatron_pp_ext.features.units.units import Units, whole
from megatron_pp_ext.runtime.plan import plan_orders, plan_rank
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Announced, Schedule
from megatron_pp_ext.schedule.costs import Costs, UnitCosts
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas
from megatron_pp_ext.schedule.placement import Placement, linear, v
from megatron_pp_ext.schedule.simulate import simulate
from tests.launches.test_cannot_hang import assert_finishes_strictly
from tests.support.few_sends import seconds_of, step_seconds

FAMILIES = "1f1b", "interleaved", "zb-h1", "v-half", "gpipe"
RANKS, MICROBATCHES = 4, 32
LONGEST = 131_072


def documents(seed: int, microbatches: int = 10) -> list[list[int]]:
    """Documents of very unlike length, as in training on long contexts."""
    random = Random(seed)
    return [
        [min(LONGEST, 200 + int(random.lognormvariate(7, 2))) for _ in range(random.randint(1, 8))]
        for _ in range(microbatches)
    ]


def planner_of(seed: int, placement: Placement) -> tuple[Planner, Units]:
    step = Microbatches.of(documents(seed, MICROBATCHES))
    mean = sum(step.tokens) / MICROBATCHES
    rates = LengthCosts.with_attention(Costs.per_rank(RANKS, placement.chunks), mean)
    return Planner(placement, rates), whole(step.documents)


@cache
def planned(family: str, seed: int) -> tuple[Plan, UnitCosts]:
    """A plan by search with the times of its microbatches, and their costs in its order."""
    schedule = catalog.build(family, RANKS, MICROBATCHES)
    planner, units = planner_of(seed, schedule.placement)
    plan = planner.timed(planner.plan(units, "search", template=Template(schedule)))
    return plan, planner.costs(units).ordered(plan.order)


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
def test_receives_of_announced_shapes_are_posted_late(family: str) -> None:
    """They would let receivers wait for their senders where those of known shapes are posted."""
    plan, costs = planned(family, 0)
    as_known = step_seconds(plan.schedule, costs, Announced.EVERY, is_late=False)
    assert as_known > 1.05 * plan.seconds
    every = step_seconds(plan.schedule, costs, Announced.EVERY)
    assert every < plan.seconds + (as_known - plan.seconds) / 2
    at_most = 1.05 if family == "gpipe" else 1.005  # many of its messages wait for a long microbatch
    assert step_seconds(plan.schedule, costs, Announced.FIRST) < at_most * plan.seconds


@pytest.mark.parametrize("announced", [Announced.FIRST, Announced.EVERY])
@pytest.mark.parametrize("family", FAMILIES)
def test_late_receives_cost_nothing_where_shapes_are_known(family: str, announced: Announced) -> None:
    plan, costs = planned(family, 0)
    plans = [plan_rank(plan.schedule, rank, announced=announced) for rank in range(RANKS)]
    at_most = 1.05 if family == "gpipe" else 1.005
    assert seconds_of(plans, plan.schedule, costs) < at_most * plan.seconds


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "interleaved", "v-half", "v-zb", "dualpipe-v", "v-min"])
def test_equal_microbatches_that_announce_their_shapes(family: str) -> None:
    schedule = catalog.build(family, RANKS, 16)
    costs = Costs.per_rank(RANKS, schedule.placement.chunks)
    known = step_seconds(schedule, costs)
    at_most = 1 if schedule.placement.chunks == 1 else 1.06
    assert step_seconds(schedule, costs, Announced.EVERY) <= at_most * known + 1e-9
    assert step_seconds(schedule, costs, Announced.FIRST) == pytest.approx(known)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plans_cannot_hang(family: str) -> None:
    schedule = planned(family, 1)[0].schedule
    assert schedule.durations
    ranks = [[plan_rank(schedule, rank)] for rank in range(schedule.ranks)]
    assert_finishes_strictly(ranks, schedule.name)


def test_equal_microbatches_have_the_plan_of_the_schedule() -> None:
    schedule = catalog.build("zb-h1", 2, 4)
    planner = Planner(schedule.placement, LengthCosts.with_attention(Costs.per_rank(2), 1))
    plan = planner.plan(whole([[5]] * 4), "rule", template=Template(schedule))
    assert planner.timed(plan).schedule is schedule


@pytest.mark.parametrize("family", [*FAMILIES, "v-zb", "dualpipe-v", "zb-h2"])
def test_receives_of_lengths_that_nobody_knows(family: str) -> None:
    """Ranks launch as if all microbatches were equal, and a receive holds up what comes after it."""
    schedule = catalog.build(family, RANKS, MICROBATCHES)
    for seed in range(2):
        planner, units = planner_of(seed, schedule.placement)
        costs = planner.costs(units)
        known = step_seconds(schedule, costs)
        assert step_seconds(schedule, costs, Announced.FIRST) < 1.01 * known
        as_known = step_seconds(schedule, costs, Announced.EVERY, is_late=False)
        assert step_seconds(schedule, costs, Announced.EVERY) < 1.01 * as_known


@pytest.mark.parametrize(("ranks", "interval"), [(2, 1), (4, 4), (4, 9)])
def test_announced_shapes_of_a_pipeline_that_never_flushes(ranks: int, interval: int) -> None:
    """What a later update takes is posted at the end of the update that sends it."""
    stages, updates = Replicas.straight(ranks), 5
    steps = [pipedream.step(stages, interval, update, updates) for update in range(updates)]
    schedule = Schedule("pipedream", linear(ranks), updates * interval, tuple(map(tuple, steps[0])))
    costs = Costs.per_rank(ranks)

    def plans(announced: Announced) -> list[Any]:
        of_ranks = []
        for rank in range(ranks):
            operations = list[object]()
            for step in steps:
                flushes = step is steps[-1]
                plan = plan_orders(stages.placed(step, announced), rank, flushes)
                operations += plan.operations
            of_ranks.append(SimpleNamespace(operations=operations))
        return of_ranks

    known = seconds_of(plans(Announced.NOTHING), schedule, costs)
    assert seconds_of(plans(Announced.EVERY), schedule, costs, Announced.EVERY) == pytest.approx(known)
    if ranks > 2:
        as_known = seconds_of(plans(Announced.NOTHING), schedule, costs, Announced.EVERY)
        assert as_known > 1.5 * known


def slices_planner(placement: Placement) -> Planner:
    """A planner for stages that differ, where attention to 8,192 tokens takes as long as all else."""
    random, rates = Random(0), []
    for _ in range(placement.stages):
        scale = random.uniform(0.7, 1.3)
        per_square = scale / 8192, 2 * scale / 8192, 0.0
        rates.append(StageRates((scale,) * 3, per_square, activation=1.0, released=0.5))
    return Planner(placement, LengthCosts(tuple(rates)))


@cache
def listed(seed: int) -> tuple[Schedule, UnitCosts]:
    """A plan of slices by list scheduling, and what its units cost."""
    planner, step = slices_planner(v(RANKS)), documents(seed)
    limit = 0.6 * 2 * sum(sorted(map(sum, step), reverse=True)[:RANKS])
    plan = planner.plan(planner.cut(step, 1024), "rule", limits=[max(limit, 2.0 * LONGEST)] * RANKS)
    return planner.timed(plan).schedule, planner.costs(plan.units)


@pytest.mark.parametrize("seed", range(3))
def test_slices_take_what_is_planned(seed: int) -> None:
    schedule, costs = listed(seed)
    assert step_seconds(schedule, costs) == pytest.approx(simulate(schedule, costs).makespan, rel=0.01)


def test_equal_times_would_let_senders_of_slices_wait() -> None:
    schedule, costs = listed(0)
    assert step_seconds(replace(schedule, durations=()), costs) > 1.1 * step_seconds(schedule, costs)


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_families_of_slices(name: str) -> None:
    planner = slices_planner(named(name, RANKS, 4).placement)
    units = planner.cut(documents(1), 1024)
    family = planner.in_family(lambda count: make(named(name, RANKS, count)).schedule, units)
    plan = planner.timed(family)
    assert step_seconds(plan.schedule, planner.costs(plan.units)) == pytest.approx(plan.seconds, rel=0.02)


def test_plans_of_slices_cannot_hang() -> None:
    planner = slices_planner(linear(3))
    plan = planner.plan(planner.cut(documents(2), 4096), "rule", limits=[3.0 * LONGEST] * 3)
    for schedule in (listed(0)[0], planner.timed(plan).schedule):
        ranks = [[plan_rank(schedule, rank)] for rank in range(schedule.ranks)]
        assert_finishes_strictly(ranks, schedule.name)
