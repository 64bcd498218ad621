"""Orders within limits that they keep with copies to the host alone."""

import json

import pytest

from megatron_pp_ext.compiler.request import placements_of
from megatron_pp_ext.features.offload import order
from megatron_pp_ext.features.offload.order import planned, published_orders, shortest_within
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate
from tests.conftest import CACHE
from tests.support.tiers import first


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
