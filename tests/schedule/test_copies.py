"""Copies to the host are a part of a schedule: its digest has them, and ``check`` proves them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Copies, Kind, Schedule
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear
from megatron_pp_ext.schedule.simulate import Copied, simulate
from megatron_pp_ext.schedule.timing import ScheduleTimer
from tests.schedule.test_check import parse, refusal
from tests.support import slow

WHOLE = catalog.build("1f1b", 4, 6)
HALVED = catalog.build("v-half", 4, 6)


def away(schedule, **back):
    """Return ``schedule`` with copies, given as s0m1="0F3": stage 0, microbatch 1, back before 0F3."""
    keys = (tuple(map(int, key[1:].split("m"))) for key in back)
    return replace(schedule, copies=Copies(dict(zip(keys, map(parse, back.values()), strict=True))))


def test_copies_between_forward_and_backward_pass():
    check(away(WHOLE, s0m1="0F3", s3m5="3B5"))
    check(away(HALVED, s0m1="0I1"))


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ({"s4m0": "0B0"}, "stage 4 and microbatch 0 are copied to the host, stages are 0..3 and"),
        ({"s0m6": "0B0"}, "stage 0 and microbatch 6 are copied to the host, stages are 0..3 and"),
        ({"s0m1": "1B1"}, "rank 0: 0F1 is reloaded before 1B1, which the rank does not do"),
        ({"s0m1": "0F1"}, "rank 0: 0F1 is reloaded before 0F1, which does not stand between it and 0B1"),
        ({"s0m1": "0B2"}, "rank 0: 0F1 is reloaded before 0B2, which does not stand between it and 0B1"),
    ],
)
def test_other_copies_are_refused(copies, message):
    assert message in refusal(away(WHOLE, **copies))


def test_memory_is_given_up_between_forward_and_copy_back():
    back = {(0, 1): parse("0F4")}
    check(replace(WHOLE, copies=Copies(back, {(0, 1): parse("0F3")})))
    wrong = replace(WHOLE, copies=Copies(back, {(0, 1): parse("0F5")}))
    assert "rank 0: 0F1 is freed before 0F5, which does not stand between it and 0F4" in refusal(wrong)
    launches = [(action,) for action in WHOLE.orders[0]]
    assert Copies(back, {(0, 1): parse("0F2")}).freed_before(launches) == {parse("0F2"): [(0, 1)]}
    assert Copies(back).freed_before(launches) == {parse("0F3"): [(0, 1)]}


def test_a_copy_is_not_launched_within_a_pair():
    paired = catalog.build("1f1b", 4, 6, paired=True)
    first = min(paired.paired)
    order = paired.orders[first.stage]
    behind = order[order.index(first) + 1]
    found = replace(paired, copies=Copies({(behind.stage, behind.microbatch): behind}))
    assert refusal(found).endswith(f"before {behind}, the second of a pair: choose the first, {first}")
    check(replace(found, copies=Copies({(behind.stage, behind.microbatch): first})))


def test_an_evaluation_copies_nothing():
    evaluation = catalog.forward_only(WHOLE.placement, 2)
    assert "rank 0: 0F1 is copied to the host, but has no backward" in refusal(away(evaluation, s0m1="0F1"))


def test_the_digest_has_the_copies_in_any_order():
    one, other = away(WHOLE, s0m1="0F3", s1m1="1B1"), away(WHOLE, s1m1="1B1", s0m1="0F3")
    assert one.digest == other.digest
    assert len({one.digest, WHOLE.digest, away(WHOLE, s0m1="0F4").digest}) == 3


def test_halved_backwards_keep_their_copies():
    halved = away(WHOLE, s0m1="0B1", s1m1="1F2").with_halved_backwards
    check(halved)
    assert halved.copies == Copies({(0, 1): parse("0I1"), (1, 1): parse("1F2")})


def test_copies_before_one_action_are_launched_in_the_order_of_their_backwards():
    found = away(WHOLE, s0m2="0F4", s0m1="0F4", s0m3="0F5")
    launched = found.copies.reloaded_before(found.orders[0])
    assert launched == {parse("0F4"): [(0, 1), (0, 2)], parse("0F5"): [(0, 3)]}


def alone(launch):
    """One rank with two microbatches, of which the first is away until ``launch``."""
    order = tuple(
        Action(0, kind, number) for kind, number in [(Kind.F, 0), (Kind.F, 1), (Kind.B, 1), (Kind.B, 0)]
    )
    return Schedule("by hand", linear(1), 2, (order,), copies=Copies({(0, 0): order[launch]}))


def test_by_hand():
    """F of 2 and B of 7; a copy of 3 each way ends in the second F, and the one back waits or is in time."""
    costs = Costs((StageCosts(2, 3, 4, activation=10, copy=3),))
    early, late = simulate(alone(launch=2), costs), simulate(alone(launch=3), costs)
    # What is computed next waits for the end of the copy, at which the memory is given up.
    assert early.copies == ((Copied(0, 0, (2, 5), 5, 5, (5, 8)),),)
    assert early.makespan == 19
    assert list(early.memory(0)) == [(0, 0), (0, 10), (2, 20), (5, 10), (5, 20), (12, 10), (19, 0)]
    assert late.copies == ((Copied(0, 0, (2, 5), 11, 11, (11, 14)),),)
    assert late.makespan == 21
    assert late.peak_on_host == (10,)
    assert simulate(replace(alone(2), copies=Copies()), costs).peak_on_host == (0,)
    assert list(late.memory(0)) == [(0, 0), (0, 10), (2, 20), (11, 10), (11, 0), (11, 10), (21, 0)]


@settings(max_examples=150, deadline=None)
@given(slow.schedules(), st.data())
def test_agrees_with_the_slow_simulator(schedule, data):
    schedule = data.draw(slow.copying(schedule))
    costs = data.draw(slow.costs_of(schedule))
    start = slow.starts(schedule, costs)
    timeline = simulate(schedule, costs)
    found = {event.action: event.start for row in timeline.events for event in row}
    for copied in (copied for row in timeline.copies for copied in row):
        for way in ("out", "back"):
            begin, end = getattr(copied, way)
            found[way, copied.stage, copied.microbatch] = begin
            assert end == begin + costs.stages[copied.stage].copy
    assert found == start
    for rank in range(schedule.placement.ranks):
        curve = list(timeline.memory(rank))
        assert curve == sorted(curve, key=lambda step: step[0])
        assert curve[-1][1] == 0
        for (time, live), (then, _) in zip(curve, [*curve[1:], (None, 0)], strict=True):
            if time != then:
                assert live == slow.live(schedule, costs, start, rank, time)


@settings(max_examples=60, deadline=None)
@given(slow.schedules(), st.data())
def test_a_step_is_never_shorter_with_copies_and_its_critical_path_is_a_bound(schedule, data):
    copying = data.draw(slow.copying(schedule))
    costs = data.draw(slow.costs_of(schedule))
    timer = ScheduleTimer(copying)
    makespan = simulate(copying, costs).makespan
    assert makespan >= simulate(schedule, costs).makespan
    path = timer.critical_path(costs)
    assert path.makespan == makespan == timer.makespan(costs.seconds, costs)
    work = sum(
        f * stage.forward + i * stage.input_gradient + w * stage.weight_gradient - b * stage.hidden
        for (f, i, w, b), stage in zip(path.work, costs.stages, strict=True)
    )
    assert work <= makespan
