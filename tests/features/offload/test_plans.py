"""Plans of copies: what leaves, and what a step then takes and keeps."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.features.offload import copies as offload
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
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate
from tests.support import slow
from tests.support.tiers import wide


def costs_of(schedule, copy):
    """Unit costs of a whole rank, and the time in which all of its activations of a microbatch are copied."""
    return Costs.per_rank(schedule.ranks, schedule.placement.chunks).copied_at(copy)


def least_makespan(schedule, costs):
    """Return a time below which no step with the copies of ``schedule`` is, whenever they are launched.

    It is that of the order without copies, or more where a copy engine is the slowest: it begins when the
    first forward with a copy has ended, and behind the last copy come at least a copy back and a backward.
    """
    alone = offload.without_copies(schedule, costs)
    least = alone.makespan
    for events in alone.events:
        away = [event for event in events if event.action[::2] in schedule.copies.reloads]
        forwards = [event for event in away if event.action.kind is Kind.F]
        if forwards:
            stages = [costs.stages[event.action.stage] for event in forwards]
            first = min(event.end for event in forwards) - alone.start
            behind = min(stage.copy for stage in stages) + min(stage.seconds(Kind.B) for stage in stages)
            least = max(least, first + sum(stage.copy for stage in stages) + behind)
    return least


@pytest.mark.parametrize("name", catalog.NAMES)
def test_half_of_any_family_leaves_for_nothing(name):
    """A copy takes half of a forward.  On 1F1B's last rank nothing waits, so that the others send more."""
    schedule = catalog.build(name, 8, 32)
    costs = costs_of(schedule, 0.5)
    timeline = offload.with_share(schedule, costs, 0.5)
    check(timeline.schedule)
    assert timeline.makespan == simulate(schedule, costs).makespan
    assert offload.share_offloaded(timeline) == 0.5


@settings(max_examples=60, deadline=None)
@given(slow.schedules(), st.data())
def test_no_share_makes_a_step_longer_or_more_than_was_asked_for_leave(schedule, data):
    """A copy is done before its memory is given up, and that before the copy back is launched."""
    costs, share = data.draw(slow.costs_of(schedule)), data.draw(st.floats(0.01, 1))
    alone, timeline = simulate(schedule, costs), offload.with_share(schedule, costs, share)
    check(timeline.schedule)
    assert timeline.events == alone.events
    wanted = round(share * schedule.placement.stages * schedule.microbatches)
    assert len(timeline.schedule.copies.reloads) <= wanted
    starts = {event.action: event.start for events in timeline.events for event in events}
    for row in timeline.copies:
        for way in ("out", "back"):
            times = sorted(getattr(copied, way) for copied in row)
            assert all(end <= start for (_, end), (start, _) in pairwise(times))
        for copied in row:
            given_up = starts[timeline.schedule.copies.frees[copied[:2]]]
            assert copied.out[1] < copied.launched and given_up >= copied.out[1] - 1e-6


@settings(max_examples=60, deadline=None)
@given(slow.schedules(), st.data())
def test_a_limit_is_kept_or_exceeded_as_claimed(schedule, data):
    costs = data.draw(slow.costs_of(schedule))
    alone = simulate(schedule, costs)
    peaks = alone.peak_memory
    limits = [data.draw(st.integers(0, round(peak) + 1)) for peak in peaks]
    timeline = offload.within(schedule, costs, limits)
    check(timeline.schedule)
    above = [max(0, peak - limit) for peak, limit in zip(timeline.peak_memory, limits, strict=True)]
    assert offload.over(timeline, limits) == pytest.approx(max(above), abs=1e-6)
    if all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)):
        assert not timeline.schedule.copies
    assert timeline.makespan == alone.makespan == least_makespan(timeline.schedule, costs)


def test_the_copy_engine_bounds_a_step():
    """All 16 microbatches leave in 5 each, behind the first forward; then one comes back for its B of 2."""
    schedule = catalog.build("gpipe", 2, 16)
    backwards = [action for action in schedule if action.kind is Kind.B]
    copies = replace(schedule.copies, reloads={(one.stage, one.microbatch): one for one in backwards})
    schedule = replace(schedule, copies=copies)
    costs = costs_of(schedule, 5.0)
    assert least_makespan(schedule, costs) == 2 + 16 * 5 + 5 + 2
    assert simulate(schedule, costs).makespan >= 89


def test_no_more_leaves_than_keeps_the_limit():
    """1F1B's rank r of 4 keeps 4 - r; a copy is under way for a quarter of a forward."""
    schedule = catalog.build("1f1b", 4, 8)
    timeline = offload.within(schedule, costs_of(schedule, 0.25), [2, 2, 2, 1])
    assert timeline.peak_memory == (2, 2, 2, 1) and not offload.over(timeline, [2, 2, 2, 1])
    away = [sum(kept[0] == stage for kept in timeline.schedule.copies.reloads) for stage in range(4)]
    assert away[0] > 0 < away[1] and away[2:] == [0, 0]


@pytest.mark.parametrize("share", [0, -0.1, 1.1])
def test_other_shares_are_refused(share):
    schedule = catalog.build("1f1b", 2, 2)
    with pytest.raises(ValueError, match=r"on the host is .*: give one above 0, at most 1"):
        offload.with_share(schedule, costs_of(schedule, 0.5), share)


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
