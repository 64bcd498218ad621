"""Copies run beside the actions of their rank, one after the other each way, and free memory in between."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.schedule.actions import Action, Copies, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear
from megatron_pp_ext.schedule.simulate import Copied, simulate
from megatron_pp_ext.schedule.timing import ScheduleTimer
from tests.support import slow


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
