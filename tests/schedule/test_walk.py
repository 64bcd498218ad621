"""Compiled loops and plain Python take the same steps, at the same times to the last digit."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.buffers import most_buffers
from megatron_pp_ext.schedule.check import InvalidSchedule
from megatron_pp_ext.schedule.columns import as_list
from megatron_pp_ext.schedule.costs import Costs, StageCosts, VocabularyCosts
from megatron_pp_ext.schedule.placement import linear
from megatron_pp_ext.schedule.timing import ScheduleTimer
from megatron_pp_ext.schedule.vocabulary import share


def costs_of(schedule, random):
    """Random costs, with equal stages among them, so that actions end at the same time."""
    different = [StageCosts(*(random.uniform(1, 3) for _ in range(3))) for _ in range(2)]
    stages = tuple(random.choice(different) for _ in range(schedule.placement.stages))
    shared = (
        VocabularyCosts(0.5, 0.25, hidden=0.1, sums=0.2) if schedule.placement.shares_vocabulary else None
    )
    return Costs(stages, hop=random.choice([0.0, 0.3]), vocabulary=shared, pair=random.uniform(0.5, 1))


@pytest.mark.parametrize("name", catalog.NAMES)
def test_both_find_the_same(name):
    random, entry = Random(name), catalog.entry(name)
    for ranks, microbatches in product((2, 5), (1, 4, 11)):
        schedules = [entry.build(ranks, microbatches), share(lambda m: entry.build(ranks, m), microbatches)]  # noqa: B023
        if entry.make_paired:
            schedules.append(entry.build(ranks, microbatches, paired=True))
        for schedule in schedules:
            plain, fast = ScheduleTimer(schedule), ScheduleTimer(schedule, is_repeated=True)
            assert as_list(fast.walk.step_of) == plain.walk.step_of
            assert most_buffers(fast.walk) == most_buffers(plain.walk)
            costs = costs_of(schedule, random)
            assert fast.spans(costs) == plain.spans(costs)
            assert fast.critical_path(costs) == plain.critical_path(costs)


@pytest.mark.parametrize("is_repeated", [False, True])
def test_orders_that_hang_are_refused(is_repeated):
    good = catalog.build("1f1b", 2, 2)
    first, last = good.orders
    with pytest.raises(InvalidSchedule, match="deadlock"):
        ScheduleTimer(replace(good, orders=(first, last[::-1])), is_repeated)
    lost = Schedule("lost", linear(2), 1, ((Action(0, Kind.F, 0),), (Action(1, Kind.B, 0),)))
    with pytest.raises(InvalidSchedule, match="1B0 waits for 1F0, which no rank does"):
        ScheduleTimer(lost, is_repeated)
