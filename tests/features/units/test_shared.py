"""Pipelines that share experts have as many units in each place, all of which fit one order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_pp_ext.features.units.plan import Planner
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.features.units.units import cut_alike, in_order_of, require_chain_order
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import v

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
