"""Plans of ranks whose W have other places: the launches of all ranks keep their one order."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.runtime.operations.compute import Compute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind

SPLIT = [name for name in catalog.NAMES if catalog.build(name, 2, 4).splits_backward]


def moved(actions: tuple[Action, ...], random: Random) -> list[Action]:
    """Return the actions with each W somewhere after its I."""
    order = [action for action in actions if action.kind is not Kind.W]
    for weight in (action for action in actions if action.kind is Kind.W):
        first = order.index(Action(weight.stage, Kind.I, weight.microbatch)) + 1
        order.insert(random.randint(first, len(order)), weight)
    return order


def is_weight(operation: object) -> bool:
    return isinstance(operation, Compute) and operation.action.kind is Kind.W


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SPLIT), st.integers(2, 4), st.integers(1, 8), st.integers(0, 1 << 20))
def test_w_move_and_nothing_else_does(name, ranks, microbatches, seed):
    schedule = catalog.build(name, ranks, microbatches)
    for rank in range(ranks):
        plan = plan_rank(schedule, rank)
        if schedule.paired:
            with pytest.raises(ValueError, match="in pairs keep their places"):
                plan.with_weights_moved(plan.actions)
            continue
        order = moved(plan.actions, Random(seed))
        found = plan.with_weights_moved(order)
        assert found.actions == tuple(order)
        works = [one.action for one in found.operations if isinstance(one, Compute)]
        assert works == [action for action in order]
        others = [one for one in found.operations if not is_weight(one)]
        assert others == [one for one in plan.operations if not is_weight(one)]
        assert plan.with_weights_moved(plan.actions).actions == plan.actions


def test_other_actions_keep_their_order():
    plan = plan_rank(catalog.build("zb-h1", 2, 4), 0)
    with pytest.raises(ValueError, match="not those of the plan with W in other places"):
        plan.with_weights_moved(plan.actions[::-1])
