"""What a step of unlike microbatches is planned by: its limit in tokens, and the schedule in force."""

from types import SimpleNamespace

import pytest

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.megatron.steps import Ordered, limits_of
from megatron_pp_ext.features.units.options import Ordering
from megatron_pp_ext.features.units.plan import Planner
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.features.units.units import whole
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import v


def test_a_limit_is_raised_to_the_largest_microbatch_in_all_chunks() -> None:
    placement, rates = v(2), LengthCosts.with_attention(Costs.per_rank(2, 2), 1)
    planner, units = Planner(placement, rates), whole([[10], [400], [30]])
    costs = planner.costs(units)
    limits = limits_of(named("flex", 2, 3, limit=0.01), planner, units)
    largest = costs.units[1].stages
    for rank, limit in enumerate(limits):
        first, second = placement.stages_of(rank)
        assert limit == pytest.approx(largest[first].activation + largest[second].activation)


def test_a_plan_is_of_the_schedule_in_force() -> None:
    """A schedule may change during a run, with as many microbatches as before."""
    steps = Ordered(Pipeline(named("1f1b", 2, 4)), Ordering("rule"))
    before, after = (catalog.build(name, 2, 4) for name in ("zb-h1", "1f1b"))
    templates = [
        steps.template(SimpleNamespace(schedule=schedule, may_move_weights=False))  # type: ignore[arg-type]
        for schedule in (before, before, after)
    ]
    assert templates[0] is templates[1] is not templates[2]
    assert [template.schedule for template in templates] == [before, before, after]
