from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear, v
from megatron_pp_ext.schedule.simulate import Event, simulate
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
