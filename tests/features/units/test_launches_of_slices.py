"""Ranks launch by the times of a plan's units: no sender waits for a receive that is posted too late."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.plan import Planner
from megatron_pp_ext.features.units.rates import LengthCosts, StageRates
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import UnitCosts
from megatron_pp_ext.schedule.placement import Placement, linear, v
from megatron_pp_ext.schedule.simulate import simulate
from tests.launches.test_cannot_hang import assert_finishes_strictly
from tests.support.few_sends import step_seconds

RANKS = 4


def documents(seed: int) -> list[list[int]]:
    """Documents of very unlike length, as in training on long contexts."""
    random = Random(seed)
    return [
        [min(131_072, 200 + int(random.lognormvariate(7, 2))) for _ in range(random.randint(1, 8))]
        for _ in range(10)
    ]


def planner(placement: Placement) -> Planner:
    """A planner for stages that differ, where attention to 8,192 tokens takes as long as all else."""
    random, rates = Random(0), []
    for _ in range(placement.stages):
        scale = random.uniform(0.7, 1.3)
        per_square = scale / 8192, 2 * scale / 8192, 0.0
        rates.append(StageRates((scale,) * 3, per_square, activation=1.0, released=0.5))
    return Planner(placement, LengthCosts(tuple(rates)))


@cache
def listed(seed: int) -> tuple[Schedule, UnitCosts]:
    """A plan of list scheduling, and what its units cost."""
    one, given = planner(v(RANKS)), documents(seed)
    limit = 0.6 * 2 * sum(sorted(map(sum, given), reverse=True)[:RANKS])
    found = one.timed(one.plan(one.cut(given, 1024), "rule", limits=[max(limit, 2.0 * 131_072)] * RANKS))
    return found.schedule, one.costs(found.units)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_takes_what_is_planned(seed: int) -> None:
    schedule, costs = listed(seed)
    planned = simulate(schedule, costs).makespan
    assert step_seconds(schedule, costs) == pytest.approx(planned, rel=0.01)


def test_equal_times_would_let_senders_wait() -> None:
    schedule, costs = listed(0)
    as_equal = replace(schedule, durations=())
    assert step_seconds(as_equal, costs) > 1.1 * step_seconds(schedule, costs)


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_families(name: str) -> None:
    one, given = planner(named(name, RANKS, 4).placement), documents(1)
    family = one.in_family(lambda count: make(named(name, RANKS, count)).schedule, one.cut(given, 1024))
    found = one.simulated(one.timed(family))
    assert step_seconds(found.schedule, one.costs(found.units)) == pytest.approx(found.seconds, rel=0.02)


def test_the_plans_cannot_hang() -> None:
    one = planner(linear(3))
    plans = [
        listed(0)[0],
        one.timed(one.plan(one.cut(documents(2), 4096), "rule", limits=[3.0 * 131_072] * 3)).schedule,
    ]
    for schedule in plans:
        ranks = [[plan_rank(schedule, rank)] for rank in range(schedule.ranks)]
        assert_finishes_strictly(ranks, schedule.name)


def test_ranks_with_other_times_do_not_have_the_same_schedule() -> None:
    schedule, _ = listed(0)
    first, *others = schedule.durations
    other = replace(schedule, durations=((first[0] + 1, *first[1:]), *others))
    assert other.digest != schedule.digest
