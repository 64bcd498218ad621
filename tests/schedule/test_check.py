"""``check`` finds every kind of fault in a schedule; each test breaks a valid one."""

import re
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.features.vocabulary.share import share
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Copies, Kind, Schedule
from megatron_pp_ext.schedule.check import InvalidSchedule, check, require_one_forward_order
from megatron_pp_ext.schedule.costs import Costs, HeadCosts, StageCosts
from megatron_pp_ext.schedule.placement import Placement, Shape, linear, loop
from megatron_pp_ext.schedule.program import as_list
from megatron_pp_ext.schedule.simulate import most_buffers, simulate
from megatron_pp_ext.schedule.timing import ScheduleTimer
from tests.support import slow


def parse(text):
    stage, kind, microbatch = re.fullmatch(r"(\d+)([FIWB])(\d+)", text).groups()
    return Action(int(stage), Kind(kind), int(microbatch))


def written(*rows, microbatches):
    """Return a linear schedule from one string for each rank."""
    orders = tuple(tuple(map(parse, row.split())) for row in rows)
    return Schedule("written", linear(len(rows)), microbatches, orders)


def edit(schedule, rank, change):
    orders = list(schedule.orders)
    orders[rank] = tuple(change(list(orders[rank])))
    return replace(schedule, orders=tuple(orders))


def refusal(schedule):
    with pytest.raises(InvalidSchedule) as error:
        check(schedule)
    assert "\n" not in str(error.value)
    return str(error.value)


WHOLE = catalog.build("1f1b", 4, 6)
HALVED = catalog.build("v-half", 4, 6)


def test_another_order_of_forwards_is_valid_but_reads_other_samples():
    swapped = written("0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0", microbatches=2)
    check(swapped)
    with pytest.raises(InvalidSchedule, match="place 0 of the forwards is microbatch 0 on stage 0 and 1 on"):
        require_one_forward_order(swapped)


@pytest.mark.parametrize(
    ("schedule", "rank", "gone", "more", "message"),
    [
        (WHOLE, 2, "2F3", "", "rank 2: 2F3 is missing"),
        (WHOLE, 0, "0B5", "", "rank 0: 0B5 is missing"),
        (HALVED, 1, "6I2", "", "rank 1: 6I2 is missing next to 6W2"),
        (HALVED, 1, "6W2", "", "rank 1: 6W2 is missing next to 6I2"),
        (WHOLE, 2, "", "2B3", "rank 2: 2B3 is doubled"),
        (WHOLE, 2, "", "4F0", "rank 2: 4F0 is unknown, stages are 0..3"),
        (WHOLE, 2, "", "2F6", "rank 2: 2F6 is unknown"),
        (WHOLE, 2, "", "2B99", "microbatches are 0..5"),
        (WHOLE, 2, "", "2I1", "rank 2: 2B1 and 2I1 do the same work twice"),
        (WHOLE, 2, "", "2W1", "rank 2: 2B1 and 2W1 do the same work twice"),
    ],
)
def test_an_action_too_few_or_too_many(schedule, rank, gone, more, message):
    left = [action for action in schedule.orders[rank] if str(action) != gone]
    assert (len(left) < len(schedule.orders[rank])) is bool(gone)
    assert message in refusal(edit(schedule, rank, lambda _: [*left, *([parse(more)] if more else [])]))


def test_a_stage_on_two_ranks():
    moved = edit(WHOLE, 2, lambda order: [a for a in order if a != parse("2B5")])
    moved = edit(moved, 1, lambda order: [*order, parse("2B5")])
    assert "rank 1: 2B5 puts stage 2 on two ranks" in refusal(moved)


def test_ranks_and_microbatches_must_be_there():
    assert "orders 3 ranks, but its placement has 4" in refusal(replace(WHOLE, orders=WHOLE.orders[:3]))
    assert "has 0 microbatches" in refusal(Schedule("none", linear(2), 0, ((), ())))


def test_a_rank_that_waits_for_itself():
    swapped = written("0F0 0W0 0I0", "1F0 1I0 1W0", microbatches=1)
    assert "deadlock: rank 0: 0W0 waits for 0I0" in refusal(swapped)


def test_ranks_that_wait_for_each_other():
    """Every rank alone is in order, but together they are not; a simulation says the same."""
    crossed = written("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2)
    message = refusal(crossed)
    assert "rank 0: 0B0 waits for 1B0" in message
    assert "rank 1: 1F1 waits for 0F1" in message
    with pytest.raises(InvalidSchedule) as error:
        simulate(crossed, Costs.unit(crossed.placement))
    assert str(error.value) == message
    halved = written("0F0 0B0 0F1 0B1", "1F0 1F1 1I0 1W0 1I1 1W1", microbatches=2)
    assert "rank 0: 0B0 waits for 1I0" in refusal(halved)


def test_a_long_circle_is_cut_short():
    """Every rank starts with its second chunk, and so waits for the rank before it."""
    orders = tuple(tuple(Action(stage, Kind.F, 0) for stage in (rank + 8, rank)) for rank in range(8))
    message = refusal(Schedule("circle", loop(8, 2), 1, orders))
    assert message.startswith("deadlock: rank 0: 8F0 waits for 7F0, rank 7: 15F0 waits for 14F0")
    assert message.count("waits for") == 4
    assert "and 4 more ranks" in message


def test_an_evaluation_needs_all_forwards_and_only_those():
    check(written("0F0 0F1", "1F0 1F1", microbatches=2))
    assert "1F1 is missing" in refusal(written("0F0 0F1", "1F0", microbatches=2))
    assert "0B0 is missing" in refusal(written("0F0", "1F0 1B0", microbatches=1))


def test_simulate_names_an_action_that_nobody_does():
    lacking = edit(WHOLE, 1, lambda order: [a for a in order if a != parse("1F4")])
    with pytest.raises(InvalidSchedule, match=r"rank \d: \dF4 waits for 1F4, which no rank does"):
        simulate(lacking, Costs.unit(lacking.placement))


@settings(max_examples=120, deadline=None)
@given(slow.schedules(), st.data())
def test_any_reordering_is_judged_as_the_slow_simulator_judges_it(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    order = list(schedule.orders[rank])
    for _ in range(data.draw(st.integers(0, 3))):
        here, there = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
        order[here], order[there] = order[there], order[here]
    shuffled = edit(schedule, rank, lambda _: order)
    if slow.starts(shuffled, Costs.unit(schedule.placement)) is None:
        assert "waits for" in refusal(shuffled)
    else:
        check(shuffled)


@settings(max_examples=60, deadline=None)
@given(slow.schedules(), st.data())
def test_no_action_can_be_dropped_or_doubled(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    index = data.draw(st.integers(0, len(schedule.orders[rank]) - 1))
    victim = schedule.orders[rank][index]
    others = [a for a in schedule if a.kind is not Kind.F and a != victim]
    if victim.kind is Kind.F or others:
        refusal(edit(schedule, rank, lambda order: order[:index] + order[index + 1 :]))
    assert "is doubled" in refusal(edit(schedule, rank, lambda order: [*order, victim]))


@pytest.mark.parametrize(("shape", "chunks", "wanted"), [("linear", 2, 1), ("v", 3, 2)])
def test_a_shape_with_other_chunks_is_refused(shape, chunks, wanted):
    with pytest.raises(ValueError, match=rf"{shape} placement has {wanted} chunk\(s\) a rank, got {chunks}"):
        Placement(Shape(shape), 2, chunks)


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
