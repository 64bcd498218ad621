"""Compiled loops and plain Python take the same steps, at the same times to the last digit."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from megatron_pp_ext.features.vocabulary.share import share
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Copies, Kind, Schedule
from megatron_pp_ext.schedule.check import InvalidSchedule
from megatron_pp_ext.schedule.costs import Costs, HeadCosts, StageCosts
from megatron_pp_ext.schedule.placement import linear
from megatron_pp_ext.schedule.program import as_list
from megatron_pp_ext.schedule.simulate import most_buffers, simulate
from megatron_pp_ext.schedule.timing import ScheduleTimer


def costs_of(schedule, random):
    """Random costs, with equal stages among them, so that actions end at the same time."""
    different = [StageCosts(*(random.uniform(1, 3) for _ in range(3)), copy=0.6) for _ in range(2)]
    stages = tuple(random.choice(different) for _ in range(schedule.placement.stages))
    shared = HeadCosts(0.5, 0.25, hidden=0.1, sums=0.2) if schedule.placement.splits_head else None
    return Costs(stages, hop=random.choice([0.0, 0.3]), head=shared, pair=random.uniform(0.5, 1))


def with_copies(schedule):
    """The schedule with the activations of every other microbatch on the host until their backward."""
    backwards = [action for action in schedule if action.kind in (Kind.I, Kind.B) and action.microbatch % 2]
    return replace(schedule, copies=Copies({(one.stage, one.microbatch): one for one in backwards}))


@pytest.mark.parametrize("name", catalog.NAMES)
def test_both_find_the_same(name):
    """What is timed again and again ends when the simulated schedule does, too."""
    random, entry = Random(name), catalog.entry(name)
    for ranks, microbatches in product((2, 5), (1, 4, 11)):
        plain = entry.build(ranks, microbatches)
        schedules = [plain, with_copies(plain), share(lambda m: entry.build(ranks, m), microbatches)]  # noqa: B023
        if entry.make_paired:
            schedules.append(entry.build(ranks, microbatches, paired=True))
        for schedule in schedules:
            plain, fast = ScheduleTimer(schedule), ScheduleTimer(schedule, is_repeated=True)
            assert as_list(fast.walk.step_of) == plain.walk.step_of
            assert most_buffers(fast.walk) == most_buffers(plain.walk)
            if schedule.copies:
                copies = [as_list(column) for column in fast.walk.copies[1:]]
                assert copies == list(plain.walk.copies[1:])
            costs = costs_of(schedule, random)
            spans, timeline = plain.spans(costs), simulate(schedule, costs)
            assert fast.spans(costs) == spans
            assert fast.critical_path(costs) == plain.critical_path(costs)
            assert plain.makespan(costs.seconds, costs) == timeline.makespan
            assert [(one.start, one.end) for one in spans] == [
                (row[0].start, max(event.end for event in row)) for row in timeline.events
            ]
            idle = 1 - sum(span.busy for span in spans) / (ranks * timeline.makespan)
            assert idle == pytest.approx(timeline.bubble)
    slower = plain.makespan(lambda action: costs.seconds(action) + (action.microbatch == 3), costs)
    assert slower > plain.makespan(costs.seconds, costs)


@pytest.mark.parametrize("is_repeated", [False, True])
def test_orders_that_hang_are_refused(is_repeated):
    good = catalog.build("1f1b", 2, 2)
    first, last = good.orders
    with pytest.raises(InvalidSchedule, match="deadlock"):
        ScheduleTimer(replace(good, orders=(first, last[::-1])), is_repeated)
    lost = Schedule("lost", linear(2), 1, ((Action(0, Kind.F, 0),), (Action(1, Kind.B, 0),)))
    with pytest.raises(InvalidSchedule, match="1B0 waits for 1F0, which no rank does"):
        ScheduleTimer(lost, is_repeated)
