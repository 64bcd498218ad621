"""Orders within limits that they keep with copies to the host alone."""

from megatron_pp_ext.features.offload.compiled import shortest_within
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate


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
