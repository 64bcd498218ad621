"""Plans that make a step longer where more is asked for than is free: whole shares, and limits."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.features.offload.copies import (
    forwards_ahead,
    over,
    share_offloaded,
    with_share,
    with_whole_share,
    within,
    within_limits,
    without_copies,
)
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.check import check
from tests.features.offload.test_free_plans import costs_of
from tests.support import slow
from tests.support.tiers import wide

TELLING = ("1f1b", "interleaved", "zb-h1", "v-half")


@pytest.mark.parametrize("name", [name if name in TELLING else wide(name) for name in catalog.NAMES])
def test_all_leave_for_a_hundredth_of_a_step(name):
    """A copy takes a third of F + I + W each way."""
    schedule = catalog.build(name, 8, 32)
    costs = costs_of(schedule, 1.0)
    timeline = with_whole_share(schedule, costs, 1.0)
    check(timeline.schedule)
    assert share_offloaded(timeline) == 1
    assert timeline.makespan <= 1.01 * without_copies(schedule, costs).makespan


@settings(max_examples=40, deadline=None)
@given(slow.schedules(), st.data())
def test_a_share_leaves_whole(schedule, data):
    costs, share = data.draw(slow.costs_of(schedule)), data.draw(st.floats(0.01, 1))
    timeline = with_whole_share(schedule, costs, share)
    check(timeline.schedule)
    wanted = round(share * schedule.placement.stages * schedule.microbatches)
    assert len(timeline.schedule.copies.reloads) == wanted
    free = with_share(schedule, costs, share)
    if len(free.schedule.copies.reloads) == wanted:
        assert timeline == free


@settings(max_examples=60, deadline=None)
@given(slow.schedules(), st.data())
def test_a_limit_is_kept_or_cannot_be(schedule, data):
    costs = data.draw(slow.costs_of(schedule))
    limits = [
        data.draw(st.integers(0, round(peak) + 1)) for peak in without_copies(schedule, costs).peak_memory
    ]
    timeline, free = within_limits(schedule, costs, limits), within(schedule, costs, limits)
    if not over(free, limits):
        assert timeline == free
    elif timeline is not None:
        check(timeline.schedule)
        assert not over(timeline, limits)


def test_a_link_that_is_too_slow_makes_a_warm_up_wait():
    """1F1B's first ranks do their first forwards faster than they can be copied, and need not."""
    schedule = catalog.build("1f1b", 8, 32)
    costs, limits = costs_of(schedule, 1.5), [4.0] * 8
    assert over(within(schedule, costs, limits), limits)
    timeline = within_limits(schedule, costs, limits)
    assert max(timeline.peak_memory) <= 4
    assert 1 < timeline.makespan / without_copies(schedule, costs).makespan < 1.005


def test_no_copies_keep_what_a_weight_gradient_needs():
    schedule = catalog.build("zb-h1", 8, 32)
    assert within_limits(schedule, costs_of(schedule, 0.5), [2.0] * 8) is None


@pytest.mark.parametrize("name", catalog.NAMES)
@pytest.mark.parametrize("count", [0, 1, 5, 9])
def test_forwards_ahead_are_the_same_actions_in_an_order_that_ends(name, count):
    schedule = catalog.build(name, 4, 8)
    found = forwards_ahead(schedule, count)
    check(found)
    assert [set(order) for order in found.orders] == [set(order) for order in schedule.orders]
    # These two do all forwards first as it is.
    assert (found == schedule) == (count == 0 or name in ("gpipe", "breadth-first"))


def test_pairs_stay_pairs():
    schedule = catalog.build("1f1b", 4, 6, paired=True)
    found = forwards_ahead(schedule, 1)
    check(found)
    assert len(found.paired) == len(schedule.paired) - sum(
        any(action.stage == rank for action in schedule.paired) for rank in range(4)
    )
    assert replace(found, paired=frozenset()) == forwards_ahead(replace(schedule, paired=frozenset()), 1)
