"""The loops of the search give what schedules give that are prepared for a single estimate, bit for bit."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from megatron_pp_ext.planner.search.array_program import ArrayProgram
from megatron_pp_ext.planner.step.programs import Program, scheduled
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind, Schedule
from megatron_pp_ext.schedule.check import InvalidSchedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts, VocabularyCosts
from megatron_pp_ext.schedule.placement import linear

CHUNKS = {"interleaved": (2, 3), "breadth-first": (2, 3), "interleaved-zb": (2, 3)}


def costs_of(schedule, random):
    """Random costs, with equal stages among them, so that actions end at the same time."""
    different = [StageCosts(*(random.uniform(1, 3) for _ in range(3))) for _ in range(2)]
    stages = tuple(random.choice(different) for _ in range(schedule.placement.stages))
    shared = (
        VocabularyCosts(0.5, 0.25, hidden=0.1, sums=0.2) if schedule.placement.shares_vocabulary else None
    )
    return Costs(stages, hop=random.choice([0.0, 0.3]), vocabulary=shared, pair=random.uniform(0.5, 1))


def assert_the_same(schedule, random):
    plain, fast = Program(schedule), ArrayProgram(schedule)
    assert fast.peak_messages == plain.peak_messages
    no_work = len(OF_STAGES) * schedule.placement.stages + 2
    assert [place for place in fast._steps[1:, 3].tolist() if place != no_work] == [
        place for *_, place in plain.timer._needs if place != no_work
    ], "of equal ends the first one begins the critical path"
    for _ in range(2):
        costs = costs_of(schedule, random)
        assert fast.timer.spans(costs) == plain.timer.spans(costs)
        assert fast.timer.critical_path(costs) == plain.timer.critical_path(costs)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_numbers_are_those_of_a_plain_program(name):
    random = Random(name)
    ways = [(False, False), (True, False), *([(False, True)] if catalog.entry(name).make_paired else [])]
    sizes = product((2, 3, 5, 6), (1, 4, 11), CHUNKS.get(name, (catalog.entry(name).chunks,)))
    for (ranks, microbatches, chunks), (shares, is_paired) in product(sizes, ways):
        assert_the_same(scheduled(name, ranks, microbatches, chunks, shares, is_paired), random)


def test_a_rank_alone_is_timed_too():
    assert_the_same(scheduled("1f1b", 1, 5, 1, False, False), Random(1))


def test_orders_that_hang_are_refused():
    good = catalog.build("1f1b", 2, 2)
    first, last = good.orders
    with pytest.raises(InvalidSchedule, match="deadlock"):
        ArrayProgram(replace(good, orders=(first, last[::-1])))
    lost = Schedule("lost", linear(2), 1, ((Action(0, Kind.F, 0),), (Action(1, Kind.B, 0),)))
    with pytest.raises(InvalidSchedule):
        ArrayProgram(lost)
