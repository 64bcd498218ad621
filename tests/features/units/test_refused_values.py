"""Values that no step has end in one line, with the value, before anything is planned."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext import Costs, balance
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.microbatches import MOST_DOCUMENTS
from megatron_pp_ext.features.units.packing import partition
from megatron_pp_ext.features.units.plan import Planner, Template, plan
from megatron_pp_ext.features.units.rates import LengthCosts, StageRates
from megatron_pp_ext.features.units.units import (
    MOST_UNITS,
    Piece,
    Unit,
    Units,
    bounds,
    cut,
    cut_alike,
    cut_at,
    whole,
)
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.placement import v

COSTS = Costs.per_rank(2)
SCHEDULE = catalog.build("1f1b", 2, 2)
RATES = LengthCosts.with_attention(COSTS, 1)
PLANNER = Planner(v(2), LengthCosts.with_attention(Costs.per_rank(2, 2), 1))
IN_FAMILY = Planner(SCHEDULE.placement, RATES)
UNITS, WHOLE = PLANNER.cut([[300], [900]], 512), IN_FAMILY.whole([[300], [900]])

no_count = st.one_of(
    st.sampled_from([math.nan, math.inf, "2", None, True, [1]]), st.floats(), st.integers(max_value=0)
)
"""What no number of tokens or parts is."""

no_time = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, "2", None, 10**400]), st.floats(max_value=-1e-300)
)
"""What no time or amount is."""

no_rate = st.one_of(st.just(0), no_time)
"""What no number above 0 is."""

no_limit = no_rate.filter(lambda value: value != math.inf)


def refused(call, *arguments, **named_arguments):
    with pytest.raises(ValueError) as error:
        call(*arguments, **named_arguments)
    words = str(error.value)
    assert "\n" not in words and len(words) < 250
    assert ": " in words, "the value and the rule, then the fix"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_counts(data):
    count = data.draw(no_count)
    calls = [
        lambda: cut([[300]], count),
        lambda: cut([[300]], 128, multiple=count),
        lambda: cut([[300]], 128, rows=count),
        lambda: cut([[count]], 128),
        lambda: whole([[5, count]]),
        lambda: PLANNER.cut([[count]], 128),
        lambda: PLANNER.chosen_tokens([[count]], [1e9] * 2),
        lambda: plan([[5], [count]], named("1f1b", 2, 2), RATES),
        lambda: cut_alike([[[5]], [[count]]], 128),
        lambda: bounds(count, 2),
        lambda: bounds(30, count),
        lambda: Planner(v(2), PLANNER.rates, multiple=count),
        lambda: Planner(v(2), PLANNER.rates, rows=count),
        lambda: LengthCosts.measured(COSTS, count),
        lambda: LengthCosts.through(COSTS, 2, COSTS, count),
        lambda: partition([3, 4, 5], count),
        lambda: balance([3, 4, 5, 6], count, 2),
        lambda: balance([3, 4, 5, count], 2, 2),
        lambda: balance([3, 4, 5, 6], 2, [1, count], ranks=2),
    ]
    refused(data.draw(st.sampled_from(calls)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_costs_limits_and_budgets(data):
    time, rate, limit = data.draw(no_time), data.draw(no_rate), data.draw(no_limit)
    how = data.draw(st.sampled_from(["given", "rule", "search"]))
    template = Template(SCHEDULE)
    never = rate if rate != math.inf else math.nan  # infinite where attention takes no time
    calls = [
        lambda: StageRates((1.0, time, 1.0), (0.0, 0.0, 0.0)),
        lambda: StageRates((1.0, 1.0, 1.0), (time, 0.0, 0.0)),
        lambda: StageRates((1.0, 1.0, 1.0), (0.0, 0.0, 0.0), activation=time),
        lambda: LengthCosts(RATES.stages, hop=time),
        lambda: LengthCosts(RATES.stages, message=time),
        lambda: LengthCosts.with_attention(COSTS, rate),
        lambda: LengthCosts.with_attention(COSTS, 1, never),
        lambda: LengthCosts.measured(COSTS, 4096, 1, never),
        lambda: cut([[300]], 128, equal_at=never),
        lambda: balance([3, 4, 5, 6], 2, 2, equal_at=rate),
        lambda: balance([3, 4, 5, 6], 2, [1, 2], ranks=2, overhead=time),
        lambda: partition([3, 4, time], 2),
        lambda: Planner(v(2), PLANNER.rates, overhead=time),
        lambda: PLANNER.plan(UNITS, budget=time),
        lambda: PLANNER.plan(UNITS, limits=[limit, 1e9]),
        lambda: PLANNER.chosen_tokens([[300], [900]], [1e9, limit]),
        lambda: IN_FAMILY.plan(WHOLE, how, template=template, limits=[limit] * 2),
        lambda: IN_FAMILY.plan(WHOLE, how, template=template, limits=[1e9] * 3),
    ]
    refused(data.draw(st.sampled_from(calls)))


@pytest.mark.parametrize("documents", [[], [[]], [[5], []], [5], 5, None, [[1.5]], [[1 << 40]]])
@pytest.mark.parametrize("call", [whole, lambda step: cut(step, 512), lambda step: cut_alike([step], 512)])
def test_steps_without_documents(documents, call):
    refused(call, documents)


def test_what_contradicts_itself():
    refused(cut_alike, [], 512)
    refused(cut_alike, [[[5]], [[5], [6]]], 512)
    refused(cut_at, [[]])
    refused(cut_at, [])
    refused(cut, [[10]], 8, multiple=4)
    refused(LengthCosts, ())
    refused(LengthCosts, RATES.stages, pair=math.nan)
    refused(StageRates, (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    refused(PLANNER.plan, UNITS, "best")
    refused(PLANNER.plan, UNITS, limits=5)
    refused(Units.of, [[10]], [Unit(0, 0, 0, (Piece(1, 0, 10),))])
    refused(balance, [3, 4], 2, 1, ranks=2, given=[[[0]], [[9]]])


@pytest.mark.wide
def test_steps_that_are_too_large():
    refused(whole, [[1]] * (MOST_UNITS + 1))
    refused(whole, [[1] * (MOST_DOCUMENTS + 1)])
    refused(cut, [[1 << 31]], 512)
    refused(cut, [[MOST_UNITS]] * 2, 1)
    refused(bounds, 1 << 31, 1 << 31)
    refused(PLANNER.plan, cut_at([[0, 1, 2]] * 100_000))


def test_numbers_of_any_type_are_read():
    from numpy import array, int64

    assert whole(array([[5, 6]])) == whole([[int64(5), int64(6)]]) == whole([[5, 6]])


def test_attention_may_cost_next_to_nothing_or_nearly_all():
    assert bounds(3000, 3, 1e300) == bounds(3000, 3, math.inf) == [0, 1000, 2000, 3000]
    assert bounds(3000, 3, 1e-300) == [0, 1732, 2449, 3000], "by squares: 3000 * sqrt(1 / 3) and so on"
