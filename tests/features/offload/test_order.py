"""--pipeline-offload: what is requested, and the copies that the schedules of a run then have."""

import json
import re
from dataclasses import replace

import pytest

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named, placements_of
from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.features.offload import order
from megatron_pp_ext.features.offload.copies import share_offloaded
from megatron_pp_ext.features.offload.feature import Offloading
from megatron_pp_ext.features.offload.order import planned, published_orders, shortest_within
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import CostModel, Costs, StageCosts
from megatron_pp_ext.schedule.simulate import simulate
from tests.conftest import CACHE
from tests.support.tiers import first, wide

RANKS, MICROBATCHES = 4, 12


MODEL = CostModel(lambda placement: Costs.per_rank(RANKS, placement.chunks))
"""Whole ranks take 1 for F, I and W each; a copy takes half of a forward, since bytes are not known."""


def built(name, pipeline_offload, pipeline_memory_limit=None):
    request = named(name, RANKS, MICROBATCHES)
    request = order.with_offload(request, pipeline_offload, pipeline_memory_limit)
    schedule = make(request, MODEL).schedule
    check(schedule)
    costs = order.with_copy_seconds(MODEL.of(schedule.placement))
    return simulate(schedule, costs)


@pytest.mark.parametrize("name", ["1f1b", "v-half", "interleaved"])
def test_a_share_leaves(name):
    timeline = built(name, pipeline_offload="0.25")
    assert share_offloaded(timeline) == 0.25
    everything = built(name, pipeline_offload="1")
    assert share_offloaded(everything) == 1
    assert timeline.makespan <= everything.makespan <= 1.02 * timeline.makespan


def test_people_are_told_by_how_much_a_step_grows():
    request = order.with_offload(named("v-half", RANKS, MICROBATCHES), "1", None)
    note = make(request, MODEL).note
    assert re.fullmatch(r"copies to the host make steps \d\.\d% longer by the estimate", note)
    free = order.with_offload(named("v-half", RANKS, MICROBATCHES), "0.25", None)
    assert not make(free, MODEL).note


def test_auto_sends_what_costs_no_time_or_as_little_as_keeps_the_limit():
    most = built("v-min", pipeline_offload="auto")
    limited = built("v-min", pipeline_offload="auto", pipeline_memory_limit=0.5)
    assert share_offloaded(limited) < share_offloaded(most)
    assert max(limited.peak_memory) <= 0.5 * 4
    assert limited.makespan == most.makespan


def test_the_compiler_chooses_by_itself():
    """A quarter of what 1F1B keeps is one microbatch: an order alone that keeps it has hardly a pipeline."""
    request = named("flex", RANKS, MICROBATCHES, limit=0.375)
    request = order.with_offload(request, "auto", 0.375)
    schedule = make(request, MODEL).schedule
    check(schedule)
    assert schedule.name == "flex" and schedule.copies
    costs = order.with_copy_seconds(MODEL.of(schedule.placement))
    assert max(simulate(schedule, costs).peak_memory) <= 1.5


@pytest.mark.parametrize(("limit", "is_compiled"), [wide((0.375, False)), (1.0, True)])
def test_an_order_without_copies_is_compiled_where_its_bound_is_no_longer_than_the_step(limit, is_compiled):
    request = order.with_offload(named("flex", RANKS, MICROBATCHES, limit=limit), "auto", limit)
    made = []

    def alone(request):
        made.append(make(replace(request, options=()), MODEL))
        return made[-1]

    def makespan(schedule):
        return simulate(schedule, MODEL.of(schedule.placement)).makespan

    found = Offloading().order(request, MODEL, alone).schedule
    assert bool(made) == is_compiled != bool(found.copies)
    assert is_compiled or makespan(found) < makespan(alone(request).schedule)


def test_a_limit_that_no_copies_keep_is_refused():
    with pytest.raises(ValueError, match=r"^memory limit: rank 2 may keep 1, but keeps 4 under zb-h1"):
        built("zb-h1", pipeline_offload="auto", pipeline_memory_limit=0.25)


@pytest.mark.parametrize("given", ["half", "0", 1.5, "-1", "nan"])
def test_other_shares_are_refused(given):
    with pytest.raises(ValueError, match=f"^--pipeline-offload is {given}, but must be a share above 0"):
        built("1f1b", pipeline_offload=given)


def test_bytes_go_over_the_host_link():
    stage = StageCosts(0.01, 0.01, 0.01, activation=1e9, parameters=1e9)
    assert order.with_copy_seconds(Costs((stage,))).stages[0].copy == 1e9 / order.HOST_LINK
    given = Costs((StageCosts(1, 1, 1, copy=0.2),))
    assert order.with_copy_seconds(given) is given


def test_what_a_forward_keeps_is_known_where_it_is_counted_in_bytes():
    part = Part(forward_seconds=1, input_gradient_seconds=1, weight_gradient_seconds=1, parameters=7.0)
    assert part.costs().parameters == 7, "so that copies of an estimated stage are planned in bytes"
    request = order.with_offload(named("1f1b", 2, 4), 0.5, None)
    costs = Costs((StageCosts(1, 1, 1, activation=3e9, parameters=7.0),) * 2)
    assert Source(request, CostModel.fixed(costs)).kept_bytes == (3e9, 3e9)
    assert Source(request, CostModel.fixed(Costs.per_rank(2, 1))).kept_bytes == ()


def test_models_that_the_estimate_does_not_know_are_planned_at_unit_costs():
    def unknown(placement):
        raise ValueError("not modelled")

    request = order.with_offload(named("v-half", RANKS, MICROBATCHES), 0.5, None)
    schedule = make(request, CostModel(unknown)).schedule
    assert len(schedule.copies.reloads) == schedule.placement.stages * MICROBATCHES / 2


def test_costs_are_asked_for_when_the_schedule_is_requested():
    """Megatron completes its flags later, and they would then ask for what the estimate does not know."""
    asked = []

    def known_for_now(placement):
        asked.append(placement.splits_head)
        return MODEL.of(placement)

    request = order.with_offload(named("v-half", RANKS, MICROBATCHES), 0.5, None)
    source = Source(request, CostModel(known_for_now))
    assert asked == [False]
    assert source.schedule(MICROBATCHES + 1).copies
    assert asked == [False]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_vocabulary_that_ranks_share_leaves_room_for_copies(is_known):
    def costs(placement):
        if not is_known:
            raise ValueError("not modelled")
        return Costs.per_rank(RANKS).with_split_head(1.0, RANKS)

    request = replace(named("1f1b", RANKS, MICROBATCHES), splits_head=True)
    schedule = make(order.with_offload(request, 0.5, None), CostModel(costs)).schedule
    check(schedule)
    assert schedule.placement.splits_head and len(schedule.copies.reloads) == RANKS * MICROBATCHES / 2


def costs(copy):
    return Costs.per_rank(8, 2).copied_at(copy)


def test_a_quarter_of_1f1bs_memory_takes_three_percent_more_than_v_zb():
    """The goal for copies that take half of a forward: 1F1B keeps 8 microbatches."""
    families = [catalog.build(name, 8, 32) for name in ("v-zb", "dualpipe-v")]
    found = shortest_within(families, costs(0.5), [2.0] * 8)
    check(found.schedule)
    assert max(found.peak_memory) <= 2
    assert found.makespan <= 1.03 * simulate(families[0], costs(0.5)).makespan


def test_an_order_that_keeps_the_limit_by_itself_stays_as_it_is():
    family = catalog.build("v-half", 8, 32)
    assert shortest_within([family], costs(0.5), [5.0] * 8).schedule == family


def test_nothing_keeps_less_than_a_forward_alone():
    assert shortest_within([catalog.build("v-half", 8, 32)], costs(0.5), [0.4] * 8) is None


@pytest.fixture
def plans(monkeypatch):
    """The orders whose copies are planned."""
    seen, plan = [], order.least_copies
    monkeypatch.setattr(order, "least_copies", lambda *step: seen.append(step[0].schedule) or plan(*step))
    return seen


@pytest.mark.parametrize("limit", first(1, [2.0, 3.2]))
def test_few_orders_are_planned_for_what_all_of_them_have(limit, plans):
    """The shortest of twelve families comes first, with no more W waiting than copies can keep."""
    families = published_orders(placements_of(8, costs(0.3)), 32)
    found = shortest_within(families, costs(0.3), [limit] * 8)
    assert len(plans) <= 4
    alone = [shortest_within([family], costs(0.3), [limit] * 8) for family in families]
    assert found.makespan == min(one.makespan for one in alone if one)


DAMAGES = {
    "none": {},
    "no copies": {"copies": []},
    "fewer": {"copies": [[0, 0, 0, "I", 0, 0, "I", 0]]},
    "text": {"copies": "0"},
    "a kind that is none": {"copies": [[0, 0, 0, "X", 0]]},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_process_plans_and_the_others_read_the_same_copies(damage, plans, monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE, str(tmp_path))
    four, placements = Costs.per_rank(4, 2).copied_at(0.5), placements_of(4, Costs.per_rank(4, 2))
    first = planned(placements, 8, four, [1.5] * 4)
    (notes,) = tmp_path.glob("*.json")
    notes.write_text(json.dumps(json.loads(notes.read_text()) | DAMAGES[damage]))
    plans.clear()
    again = planned(placements, 8, four, [1.5] * 4)
    assert first.copies and again.copies == first.copies
    assert again.schedule.digest == first.schedule.digest
    assert bool(plans) == (damage != "none")
    for other, limit in ((four.copied_at(0.4), 1.5), (four, 1.75)):  # what was kept is no answer to these
        plans.clear()
        planned(placements, 8, other, [limit] * 4)
        assert plans
