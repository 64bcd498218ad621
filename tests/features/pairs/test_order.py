"""Compiled schedules in pairs: never longer than a family that fits, and valid whatever the order."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.features.pairs.order import in_pairs
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import linear, v
from megatron_pp_ext.schedule.simulate import simulate
from tests.support import slow

TIMES = {"forward": 1.0, "input_gradient": 1.1, "weight_gradient": 0.7}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("pair", [0.9, 0.8, 0.6])
@pytest.mark.parametrize("limit", [4.0, 8.0, 9.0, 12.0])
def test_never_longer_than_a_family_that_fits(pair, limit):
    costs = replace(Costs.uniform(v(4), **TIMES, hop=0.05), pair=pair)
    found = compile_schedule(4, 12, costs, limit, trials=30)
    check(found.timeline.schedule)
    assert max(found.timeline.peak_activations) <= limit
    assert found.lower_bound <= found.timeline.makespan
    for name, entry in catalog.ENTRIES.items():
        for paired in (False, True):
            if entry.chunks > 2 or (paired and not entry.make_paired):
                continue
            schedule = catalog.build(name, 4, 12, paired=paired)
            timeline = simulate(schedule, costs.merged(schedule.placement.stages))
            if max(timeline.peak_activations) <= limit:
                assert found.timeline.makespan <= timeline.makespan * (1 + 1e-6), name
    alone = compile_schedule(4, 12, replace(costs, pair=1.0), limit, trials=30)
    assert not alone.timeline.schedule.paired
    assert found.timeline.makespan <= alone.timeline.makespan


def test_the_result_is_kept_with_its_pairs(monkeypatch):
    costs = replace(Costs.uniform(v(4), **TIMES), pair=0.7)
    first = compile_schedule(4, 12, costs, 9.0, trials=0)
    assert first.timeline.schedule.paired
    monkeypatch.setattr("megatron_pp_ext.compiler.compile._shortest", None)
    assert compile_schedule(4, 12, costs, 9.0, trials=0) == first


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_gets_pairs_that_run(data):
    schedule = data.draw(slow.schedules())
    costs = replace(data.draw(slow.costs_of(schedule)), pair=data.draw(st.sampled_from([0.5, 0.75, 1.0])))
    timeline = in_pairs(schedule, costs)
    check(timeline.schedule)
    assert replace(timeline.schedule, paired=frozenset()) == schedule
    assert timeline == simulate(timeline.schedule, costs)


def test_a_pair_that_delays_the_others_is_dissolved():
    """Where messages are long, a pair that waits for one costs more than it saves."""
    costs = replace(Costs.uniform(linear(2), **TIMES, hop=5.0), pair=0.95)
    schedule = catalog.build("1f1b", 2, 8)
    assert in_pairs(schedule, costs).makespan <= simulate(schedule, costs).makespan
