"""Plans of steps: the order of microbatches, and where W stand."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.compiler.limits import InfeasibleLimit
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.pairs.order import request_in_pairs
from megatron_pp_ext.features.units.comparison import peak_tokens, side_by_side, timeline
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.plan import Planner, Template, in_order, plan
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.features.units.units import whole
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.check import check, require_one_forward_order
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.simulate import simulate

SHORT = 0.001
"""A budget, in seconds, for tests that do not ask how good an order is."""


def costs_of(placement, **more) -> LengthCosts:
    return LengthCosts.with_attention(Costs.per_rank(placement.ranks, placement.chunks, **more), 1)


def step(microbatches: int, seed: int = 0) -> Microbatches:
    random = Random(seed)
    lengths = (int(random.lognormvariate(9, 1)) + 1 for _ in range(3 * microbatches))
    return Microbatches.of([next(lengths) for _ in range(random.randint(1, 3))] for _ in range(microbatches))


def planned(schedule, rates, microbatches, how="search", moves_weights=True, **about):
    """Return the plan of the step under ``schedule``, and the costs of its microbatches."""
    planner = Planner(schedule.placement, rates)
    units = planner.whole(microbatches.documents)
    template = Template(schedule, moves_weights)
    return planner.plan(units, how, template=template, **about), planner.costs(units)


def without_weights(orders):
    return [[action for action in order if action.kind is not Kind.W] for order in orders]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(catalog.NAMES)),
    st.integers(2, 5),
    st.integers(1, 11),
    st.integers(0, 1 << 20),
    st.sampled_from([0.0, 0.3]),
)
def test_plans_are_valid_and_never_longer_than_what_they_start_from(name, ranks, microbatches, seed, hop):
    schedule = catalog.build(name, ranks, microbatches)
    planner, template = Planner(schedule.placement, costs_of(schedule.placement, hop=hop)), Template(schedule)
    units = planner.whole(step(microbatches, seed).documents)
    costs = planner.costs(units)
    plans = side_by_side(planner, template, units, SHORT)
    for found in plans.values():
        assert sorted(found.order) == list(range(microbatches))
        check(found.schedule)
        assert without_weights(found.schedule.orders) == without_weights(schedule.orders)
        in_order = timeline(found, costs)
        assert in_order.makespan == pytest.approx(found.seconds)
        family = simulate(schedule, costs.ordered(found.order))
        assert found.seconds <= family.makespan * (1 + 1e-9)
        for peak, before in zip(in_order.peak_activations, family.peak_activations, strict=True):
            assert peak <= before * (1 + 1e-9), "W come no later before a forward than in the family"
        assert plans["searched"].seconds <= found.seconds * (1 + 1e-9)
    assert plans["given"].order == tuple(range(microbatches))
    assert plans["given"].schedule is schedule
    again = planner.plan(units, template=Template(schedule), budget=SHORT)
    assert again == plans["searched"], "all ranks find the same"


def test_pairs_are_planned_with_what_they_take():
    schedule = make(request_in_pairs(named("dualpipe-v", 4, 9))).schedule
    found, costs = planned(schedule, replace(costs_of(schedule.placement), pair=0.7), step(9), budget=SHORT)
    check(found.schedule)
    assert found.schedule.paired == schedule.paired
    assert timeline(found, costs).makespan == pytest.approx(found.seconds)


def test_a_shared_vocabulary_is_planned_with_its_parts():
    whole = Costs.per_rank(4).with_split_head(0.5, 4)
    request = replace(named("zb-h1", 4, 8), splits_head=True)
    schedule = make(request, CostModel.fixed(whole)).schedule
    found, costs = planned(schedule, LengthCosts.with_attention(whole, 1), step(8), budget=SHORT)
    check(found.schedule)
    assert timeline(found, costs).makespan == pytest.approx(found.seconds)


def test_equal_microbatches_stay_in_their_order():
    schedule = catalog.build("1f1b", 4, 8)
    found, _ = planned(schedule, costs_of(schedule.placement), Microbatches.of([[1000, 500]] * 8))
    assert found.order == tuple(range(8))
    assert found.schedule is schedule


@pytest.mark.parametrize("how", ["rule", "search"])
@pytest.mark.parametrize("name", ["1f1b", "v-half", "interleaved", "zb-h1"])
@pytest.mark.parametrize("part", [0.9, 0.6])
def test_a_memory_limit_is_kept_in_tokens(name, how, part):
    """Also where no order of the microbatches keeps it under the schedule's order of actions."""
    schedule = catalog.build(name, 4, 12)
    rates, microbatches = costs_of(schedule.placement), step(12, seed=3)
    free = timeline(*planned(schedule, rates, microbatches, how, budget=SHORT))
    limit = max(part * max(free.peak_activations), max(microbatches.tokens))
    plan, costs = planned(schedule, rates, microbatches, how, limits=[limit] * 4, budget=SHORT)
    check(plan.schedule)
    require_one_forward_order(plan.schedule)
    found = timeline(plan, costs)
    assert max(found.peak_activations) <= limit * (1 + 1e-6)
    assert found.makespan == pytest.approx(plan.seconds)
    assert sorted(plan.schedule) == sorted(schedule)
    with pytest.raises(
        InfeasibleLimit, match="no order of these microbatches is found that keeps the memory"
    ):
        planned(schedule, rates, microbatches, how, limits=[0.9 * max(costs.tokens)] * 4, budget=SHORT)


@pytest.mark.wide
def test_a_fraction_is_one_of_what_1f1b_keeps_in_this_step():
    lengths = step(12, seed=5).documents
    request = named("flex", 4, 12, limit=0.75)
    by_length = costs_of(request.finest)
    found = plan(lengths, request, by_length, SHORT)
    costs = by_length.of(Microbatches.of(lengths))
    limit = 0.75 * max(simulate(catalog.build("1f1b", 4, 12), costs.merged(4)).peak_activations)
    cut = costs.merged(found.schedule.placement.stages)
    assert max(timeline(found, cut).peak_activations) <= limit * (1 + 1e-6)
    again = plan(step(12, seed=6).documents, request, by_length, SHORT)
    assert again.schedule.placement == found.schedule.placement, "the schedule is made once"


def test_peaks_in_tokens_count_parts_of_a_rank():
    costs = costs_of(catalog.build("gpipe", 2, 3).placement).of(Microbatches.of([[10], [20], [60]]))
    shown = simulate(catalog.build("gpipe", 2, 3), costs)
    assert peak_tokens(shown) == pytest.approx(90)
    half = costs_of(catalog.build("breadth-first", 2, 3).placement).of(Microbatches.of([[10], [20], [60]]))
    assert peak_tokens(simulate(catalog.build("breadth-first", 2, 3), half)) == pytest.approx(90)


def test_lengths_that_do_not_fit_the_schedule_are_refused():
    schedule = catalog.build("1f1b", 4, 8)
    with pytest.raises(ValueError, match="costs of 7 microbatches, but the schedule has 8"):
        planned(schedule, costs_of(schedule.placement), step(7))
    finer = catalog.build("v-half", 4, 8).placement
    with pytest.raises(ValueError, match="costs of 8 stages, but the schedule has 4"):
        Planner(finer, costs_of(finer)).plan(whole(step(8).documents), template=Template(schedule))
    with pytest.raises(ValueError, match="costs of 8 stages, but the placement has 4"):
        Planner(schedule.placement, costs_of(finer))


@pytest.mark.parametrize(
    ("name", "most"), [("1f1b", 0.94), ("interleaved", 0.93), ("zb-h1", 0.9), ("v-half", 0.9), ("v-zb", 0.92)]
)
def test_orders_are_worth_what_the_page_says(name, most):
    """Searched over given on steps like those of docs/lengths.md, which has the means of many."""
    schedule = catalog.build(name, 8, 16)
    gains = []
    for seed in range(4):
        both = (
            planned(schedule, costs_of(schedule.placement), step(16, seed), how)
            for how in ("search", "given")
        )
        (searched, _), (as_given, _) = both
        gains.append(searched.seconds / as_given.seconds)
    assert math.prod(gains) ** (1 / 4) < most


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "v-half", "v-zb"])
@pytest.mark.parametrize("microbatches", [8, 32])
def test_a_rule_is_never_worse_than_light_heavy_light_nor_a_search_than_any_known_order(name, microbatches):
    """Also for lengths that nobody had in mind: two kinds, a long tail, and a giant among equal ones."""
    random = Random(5)
    schedule = catalog.build(name, 4, microbatches)
    planner, template = Planner(schedule.placement, costs_of(schedule.placement)), Template(schedule)
    draws = (
        lambda: random.choice([500] * 9 + [60_000]),
        lambda: min(400 * int(random.paretovariate(1.1)), 131_072),
        lambda: 131_072 if random.random() < 1 / (4 * microbatches) else 4_000,
    )
    for draw in draws:
        documents = [[draw() for _ in range(4)] for _ in range(microbatches)]
        plans = side_by_side(planner, template, planner.whole(documents), SHORT)
        assert plans["by rule"].seconds <= plans["light-heavy-light"].seconds * (1 + 1e-9)
        shortest = min(plan.seconds for plan in plans.values())
        assert plans["searched"].seconds == pytest.approx(shortest)


def test_ranks_that_time_a_step_by_other_costs_have_another_digest():
    """Where receives are posted follows from the times: such ranks would launch in two orders."""
    schedule = catalog.build("zb-h1", 3, 5)
    planner = Planner(schedule.placement, costs_of(schedule.placement))
    some = [whole(step(5, seed=seed).documents) for seed in (0, 1, 0)]
    plans = [in_order(Template(schedule), units, planner.table(units), range(5)) for units in some]
    one, other, again = (planner.timed(plan).schedule for plan in plans)
    assert one.orders == other.orders and not one.units
    assert one.digest != other.digest
    assert one.digest == again.digest
