"""Rules for the order of microbatches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_pp_ext.features.units.orders import (
    ELSEWHERE,
    by_rule,
    groups_of_like_cost,
    heaviest_first,
    light_heavy_light,
)
from megatron_pp_ext.features.units.plan import Planner
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.features.units.units import cut_alike, in_order_of, require_chain_order
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import linear, loop, v

COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=20)


@given(COSTS, st.integers(1, 8))
def test_every_order_has_each_microbatch_once(costs, size):
    numbers = list(range(len(costs)))
    found = [groups_of_like_cost(costs, size), *(order(costs, costs) for order in ELSEWHERE.values())]
    found += [order for placement in (linear(4), v(4), loop(4, 2)) for order in by_rule(costs, placement)]
    assert all(sorted(order) == numbers for order in found)


@given(COSTS)
def test_costs_rise_to_the_middle_and_fall(costs):
    shown = [costs[number] for number in light_heavy_light(costs)]
    peak = (len(shown) + 1) // 2 - 1
    assert shown[: peak + 1] == sorted(shown[: peak + 1])
    assert shown[peak:] == sorted(shown[peak:], reverse=True)


def test_orders_by_hand():
    costs = [3, 1, 4, 1, 5]
    assert heaviest_first(costs) == [4, 2, 0, 1, 3], "equal ones stay in their order"
    assert light_heavy_light(costs) == [3, 0, 4, 2, 1]
    assert ELSEWHERE["largest first"](costs, [1, 2, 3, 4, 5]) == [4, 3, 2, 1, 0]


def test_groups_have_microbatches_of_like_cost():
    costs = list(range(12))
    order = groups_of_like_cost(costs, 4)
    assert [sorted(order[first : first + 4]) for first in (0, 4, 8)] == [
        [0, 1, 2, 3],
        [8, 9, 10, 11],
        [4, 5, 6, 7],
    ]
    assert order[4:8] == [9, 11, 10, 8] or order[4:8] == [8, 10, 11, 9]


@pytest.mark.parametrize("count", [5, 6, 9])
def test_a_short_group_is_light_and_last(count):
    order = groups_of_like_cost(list(range(count)), 4)
    assert sorted(order[count - count % 4 :]) == list(range(count % 4))


TOKENS = 6
DOCUMENTS = st.lists(st.integers(60, 120), min_size=1, max_size=3)
PIPELINES = st.integers(1, 4).flatmap(
    lambda count: st.tuples(*[st.lists(DOCUMENTS, min_size=count, max_size=count)] * 3)
)


@given(PIPELINES, st.sampled_from([6, 70]))
def test_one_order_fits_all(pipelines: tuple[list[list[int]], ...], tokens: int) -> None:
    heaviest, own = cut_alike(pipelines, tokens)
    planner = Planner(v(2), LengthCosts.with_attention(Costs.per_rank(2, 2), 1))
    plan = planner.plan(heaviest, "rule", limits=planner.least_limits(heaviest))
    for documents, units in zip(pipelines, own, strict=True):
        assert units.documents == tuple(map(tuple, documents))
        mine = in_order_of(plan.units, units)
        assert mine.names == plan.units.names
        require_chain_order(plan.schedule, mine)
        assert all(one <= most for one, most in zip(mine.tokens, plan.units.tokens, strict=True))
        assert all(one <= most for one, most in zip(mine.squares, plan.units.squares, strict=True))


def test_one_pipeline_has_the_units_it_needs() -> None:
    _, (one, other) = cut_alike([[[12, 3]], [[30]]], TOKENS)
    assert one.tokens == (3, 3, 3, 3, 3)
    assert other.tokens == (6,) * 5


def test_documents_of_a_pack_are_taken_apart_first() -> None:
    _, (one, _) = cut_alike([[[2, 2, 2]], [[18]]], TOKENS)
    assert one.tokens == (2, 2, 2)


def test_slices_end_at_multiples() -> None:
    _, (one, _) = cut_alike([[[16]], [[24]]], 8, multiple=4)
    assert one.tokens == (4, 4, 8)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="has 3 tokens, which make 3 units, and one in its place makes 5"):
        cut_alike([[[3]], [[30]]], TOKENS)
