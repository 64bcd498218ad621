"""A schedule that is timed again and again ends when the simulated one does."""

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.schedule.timing import ScheduleTimer


@pytest.mark.parametrize("name", catalog.NAMES)
def test_spans_are_the_simulations(name):
    schedule = catalog.build(name, 4, 9)
    stages = schedule.placement.stages
    costs = Costs(tuple(StageCosts(1 + s / 7, 1.1 + s / 9, 0.7 + s / 11) for s in range(stages)), 0.13)
    timeline, spans = simulate(schedule, costs), ScheduleTimer(schedule).spans(costs)
    assert [(span.start, span.end) for span in spans] == [
        (events[0].start, events[-1].end) for events in timeline.events
    ]
    idle = 1 - sum(span.busy for span in spans) / (len(spans) * timeline.makespan)
    assert idle == pytest.approx(timeline.bubble)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_each_action_with_seconds_of_its_own(name):
    schedule = catalog.build(name, 4, 9)
    stages = schedule.placement.stages
    costs = Costs(tuple(StageCosts(1 + s / 7, 1.1 + s / 9, 0.7 + s / 11) for s in range(stages)), 0.13)
    timer = ScheduleTimer(schedule)
    found = timer.makespan(lambda action: costs.stages[action.stage].seconds(action.kind), costs)
    assert found == simulate(schedule, costs).makespan
    slow = timer.makespan(lambda action: 1.0 + (action.microbatch == 3), costs)
    assert slow > timer.makespan(lambda action: 1.0, costs)
