from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import of_sizes
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.messages import SENDS_AHEAD
from megatron_pp_ext.schedule.placement import linear, v
from megatron_pp_ext.schedule.simulate import Event, peak_messages, simulate
from megatron_pp_ext.schedule.timing import ScheduleTimer, lenders, lenders_of
from megatron_pp_ext.view.terminal import Sketch, summary_table
from reference.published_schedules import MEASURED_COST
from tests.support import slow

F, I, W, B = OF_STAGES


def test_by_hand():
    """Two ranks, one microbatch, a hop of 0.5: every time and every step of the memory."""
    orders = ((Action(0, F, 0), Action(0, B, 0)), (Action(1, F, 0), Action(1, I, 0), Action(1, W, 0)))
    costs = Costs((StageCosts(1, 2, 3, activation=7), StageCosts(2, 4, 8, 10, 6)), hop=0.5)
    timeline = simulate(Schedule("by hand", linear(2), 1, orders), costs)
    assert [[tuple(event)[1:] for event in events] for events in timeline.events] == [
        [(0, 1), (8, 13)],
        [(1.5, 3.5), (3.5, 7.5), (7.5, 15.5)],
    ]
    assert timeline.makespan == 15.5
    assert timeline.span == 14
    assert timeline.bubble == pytest.approx(1 - 20 / 31)
    assert timeline.bubble_span == pytest.approx(1 - 20 / 28)
    assert timeline.peak_activations == (7, 10)
    assert timeline.peak_microbatches == (1, 1)
    assert list(timeline.memory(0)) == [(0, 0), (0, 7), (13, 0)]
    assert list(timeline.memory(1)) == [(0, 0), (1.5, 10), (7.5, 4), (15.5, 0)]


def test_costs_must_be_for_this_pipeline():
    schedule = catalog.build("1f1b", 4, 4)
    with pytest.raises(ValueError, match="costs are given for 8 stages, but schedule '1f1b' has 4"):
        simulate(schedule, Costs.unit(v(4)))


@settings(max_examples=120, deadline=None)
@given(slow.schedules(), st.data())
def test_agrees_with_the_slow_simulator(schedule, data):
    costs = data.draw(slow.costs_of(schedule))
    start = slow.starts(schedule, costs)
    timeline = simulate(schedule, costs)
    events = [event for row in timeline.events for event in row]
    assert {event.action: event.start for event in events} == start
    assert len(events) == len(start)

    first = [min(start[a] for a in order) for order in schedule.orders]
    last = [max(start[a] + costs.stages[a.stage].seconds(a.kind) for a in order) for order in schedule.orders]
    assert timeline.makespan == max(last) - min(first)
    assert timeline.span == max(end - begin for begin, end in zip(first, last, strict=True))
    assert 0 <= timeline.bubble < 1
    assert timeline.bubble_span <= timeline.bubble

    for rank, order in enumerate(schedule.orders):
        moments = [start[a] for a in order if a.kind is not Kind.W]
        peak = max(slow.live(schedule, costs, start, rank, moment) for moment in moments)
        assert timeline.peak_activations[rank] == peak
        curve = list(timeline.memory(rank))
        assert curve[-1][1] == 0
        assert curve == sorted(curve, key=lambda step: step[0])


@pytest.mark.parametrize(("ranks", "microbatches", "f", "i", "w", "hop", "rates"), MEASURED_COST)
def test_bubble_rates_of_the_zero_bubble_paper(ranks, microbatches, f, i, w, hop, rates):
    for name, rate in rates.items():
        schedule = catalog.build(name, ranks, microbatches)
        costs = Costs.uniform(schedule.placement, forward=f, input_gradient=i, weight_gradient=w, hop=hop)
        assert simulate(schedule, costs).bubble_span == pytest.approx(rate, abs=5e-5), name


class Counted(tuple[tuple[Event, ...], ...]):
    """The events of all ranks, which count how often somebody goes through them all."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


def test_what_is_derived_goes_through_all_ranks_equally_often_for_few_and_for_many():
    """Else a file of ten thousand ranks takes minutes, since each rank would look at all others."""

    def passes(ranks: int) -> int:
        schedule = catalog.build("1f1b", ranks, 2)
        timeline = simulate(schedule, Costs.unit(schedule.placement))
        counted = replace(timeline, events=Counted(timeline.events))
        assert counted.peak_memory == timeline.peak_memory
        Console(file=StringIO(), width=80).print(Sketch(counted), summary_table({"1f1b": counted}))
        return counted.events.passes

    assert passes(4) == passes(16)


SPLIT = [name for name, entry in catalog.ENTRIES.items() if entry.splits_backward]


def built(name, ranks, microbatches, splits_head=False):
    chunks = catalog.entry(name).chunks
    return make(of_sizes(name, ranks, microbatches, chunks, splits_head=splits_head)).schedule


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 5), (3, 3), (4, 9)])
@pytest.mark.parametrize("splits_head", [False, True])
def test_what_lends(name, ranks, microbatches, splits_head):
    schedule = built(name, ranks, microbatches, splits_head)
    for order in schedule.orders:
        for place, lender in lenders(order, schedule.paired):
            input, weight = order[place], order[lender]
            assert (input.kind, weight.kind) == (Kind.I, Kind.W)
            assert {action.kind for action in order[place + 1 : lender]} <= {Kind.S, Kind.T}
            # The lender's own I is done, or this one; other I and W of the stages, and forwards, are to come.
            assert order.index(weight._replace(kind=Kind.I)) <= place
            rest = order[lender + 1 :]
            assert any(action.kind is Kind.W and action.stage == weight.stage for action in rest)
            assert any(action.kind is Kind.I and action.stage == input.stage for action in rest)
            assert any(action.kind is Kind.F for action in order[place:])


def test_zb_h1_by_hand():
    """The last W lends nothing, and nothing does after the last F."""
    schedule = catalog.build("zb-h1", 2, 3)
    assert " ".join(map(str, schedule.orders[0])) == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"
    assert lenders(schedule.orders[0], frozenset()) == [(2, 3)]


def test_none_lends_across_another_action_or_to_a_pair():
    order = catalog.build("zb-h1", 2, 3).orders[0]
    whole = (*order[:3], order[3]._replace(kind=Kind.B, microbatch=1), *order[3:])
    assert lenders(whole, frozenset()) == []
    assert lenders(order, frozenset({order[1]})) == []


def test_parts_of_a_split_head_may_come_between():
    schedule = built("zb-h1", 4, 16, splits_head=True)
    found = lenders(schedule.orders[-1], schedule.paired)
    assert any(lender > place + 1 for place, lender in found)


@given(st.sampled_from(SPLIT), st.integers(2, 4), st.integers(1, 9), st.floats(0, 0.5), st.floats(0, 0.8))
def test_lent_seconds_move_and_hidden_ones_go(name, ranks, microbatches, hidden, lent):
    """Each rank works as long as without, less what its messages hide, whatever the order."""
    schedule = catalog.build(name, ranks, microbatches)
    stages = schedule.placement.stages
    plain = Costs((StageCosts(1, 1.2, 0.8),) * stages)
    lending = Costs((StageCosts(1, 1.2, 0.8, hidden=hidden, lent=lent, hidden_beside=hidden),) * stages)
    alone, beside = (simulate(schedule, costs) for costs in (plain, lending))
    timer = ScheduleTimer(schedule)
    for rank, places in enumerate(timer.lenders):

        def busy(timeline, rank=rank):
            return sum(end - start for _, start, end in timeline.events[rank])

        wholes = sum(action.kind is Kind.B for action in schedule.orders[rank])
        saved = len(places) * min(hidden, lent) + wholes * hidden
        assert busy(beside) == pytest.approx(busy(alone) - saved)
        order = schedule.orders[rank]
        assert lenders_of(schedule, rank) == {order[place]: order[lender] for place, lender in places}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 4), (4, 32), (8, 16)])
def test_lending_never_makes_a_step_longer_at_usual_costs(name, ranks, microbatches):
    schedule = catalog.build(name, ranks, microbatches)
    stages = schedule.placement.stages
    costs = StageCosts(1.0, 1.15, 0.85, lent=0.35, hidden_beside=0.2)
    alone = StageCosts(1.0, 1.15, 0.85)
    if any(action.kind is Kind.B for action in schedule):
        pytest.skip("whole backwards hide their messages anyhow")
    steps = [simulate(schedule, Costs((one,) * stages)).makespan for one in (costs, alone)]
    assert steps[0] <= steps[1]


@pytest.mark.parametrize(
    ("name", "p", "m", "received", "sent"),
    [
        # One microbatch: every message is taken before the next one is posted.
        ("1f1b", 2, 1, (1, 1), (1, 1)),
        ("1f1b", 4, 1, (1, 1, 1, 1), (1, 2, 2, 1)),
        # A V sends over both of its legs, and nothing at its turn.
        ("v-half", 2, 1, (1, 1), (2, 2)),
        # The first rank is done with its second forward before the last rank is with its first.
        ("1f1b", 2, 2, (1, 2), (2, 2)),
        ("1f1b", 2, 8, (1, 2), (8, 8)),
    ],
)
def test_buffers_by_hand(name, p, m, received, sent):
    """``SENDS_AHEAD`` of the sent messages may be unfinished, and the one that was just sent."""
    both = tuple(take + min(give, SENDS_AHEAD + 1) for take, give in zip(received, sent, strict=True))
    assert peak_messages(catalog.build(name, p, m)) == both


def test_gpipe_s_forwards_wait_for_nobody():
    """All ranks run forwards at one pace, so two activations wait at most however many microbatches come."""
    few, many = (peak_messages(catalog.build("gpipe", 4, m)) for m in (8, 64))
    assert few == many == (2 + SENDS_AHEAD + 1,) * 4
