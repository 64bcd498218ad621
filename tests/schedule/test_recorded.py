"""Recorded steps: idle time by cause, the costs that were measured, and a replay on own cores."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear
from megatron_pp_ext.schedule.recorded import (
    Measured,
    RankRecord,
    RecordedStep,
    Reduction,
    extent,
    idle_times,
    measured_costs,
    message_seconds,
    on_own_cores,
)
from megatron_pp_ext.schedule.simulate import Timeline, simulate

UNIT = {"forward": 1, "input_gradient": 1, "weight_gradient": 1}


@st.composite
def recorded_steps(draw) -> RecordedStep:
    """Draw any times with which a rank does one action after the other; whole, so that sums are exact."""
    ranks, microbatches = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    schedule = catalog.build(draw(st.sampled_from(catalog.NAMES)), ranks, microbatches)
    seconds = st.integers(0, 20)
    records = []
    for order in schedule.orders:
        now, events = draw(seconds), []
        for action in order:
            start = now + draw(seconds)
            now = start + draw(seconds)
            events.append(Measured(action, start, now, 0))
        reductions = tuple(
            Reduction(0, begin, begin + draw(seconds))
            for begin in draw(st.lists(st.integers(0, now + 30), max_size=3))
        )
        records.append(RankRecord(tuple(events), 0, 0, reductions))
    return RecordedStep(schedule.name, schedule.placement, tuple(records))


@given(recorded_steps())
@settings(max_examples=200, deadline=None)
def test_the_causes_sum_up_to_the_idle_time(step):
    start, end = extent(step)
    for record, causes in zip(step.records, idle_times(step), strict=True):
        assert sum(causes) == end - start - sum(event.end - event.start for event in record.events)
        assert min(causes) >= 0


def simulated(name: str, costs: dict[str, float], p: int = 3, m: int = 4) -> RecordedStep:
    schedule = catalog.build(name, p, m)
    timeline = simulate(schedule, Costs.uniform(schedule.placement, **costs))
    records = tuple(RankRecord(tuple(Measured(*event, 0) for event in row), 0, 0) for row in timeline.events)
    return RecordedStep(name, schedule.placement, records)


def test_a_simulated_step_has_no_overhead_and_hops_are_late_messages():
    """1F1B in unit time: a rank fills for as many forwards, and drains as many backwards, as precede it."""
    idle = idle_times(simulated("1f1b", UNIT))
    assert [causes.warm_up for causes in idle] == [0, 1, 2]
    assert [causes.cool_down for causes in idle] == [0, 2, 4]
    assert [causes.unfinished_stages for causes in idle] == [6, 3, 0]
    assert {(c.late_messages, c.reductions, c.overhead) for c in idle} == {(0, 0, 0)}
    with_hops = simulated("1f1b", UNIT | {"hop": 0.25})
    assert all(causes.late_messages > 0 for causes in idle_times(with_hops)[:2])
    assert set(message_seconds(with_hops)) == {0.25}


def test_reductions_count_only_after_the_last_action_and_once():
    step = simulated("1f1b", UNIT, p=2, m=1)
    first, last = step.records
    assert (first.events[-1].end, last.events[-1].end) == (6, 4)
    reduced = last._replace(reductions=(Reduction(0, 3, 5), Reduction(0, 4.5, 8), Reduction(0, 2, 3)))
    causes = idle_times(RecordedStep(step.name, step.placement, (first, reduced)))
    assert (causes[1].reductions, causes[1].cool_down) == (4, 0)
    assert (causes[0].reductions, causes[0].cool_down) == (0, 2)


def test_a_gap_without_a_message_is_overhead():
    step = simulated("zb-h1", UNIT, p=2, m=2)
    first, last = step.records
    held_up = last._replace(
        events=tuple(
            event._replace(start=event.start + 10, end=event.end + 10) if number == 5 else event
            for number, event in enumerate(last.events)
        )
    )
    assert last.events[5].action.kind == "W"
    assert idle_times(RecordedStep(step.name, step.placement, (first, held_up)))[1].overhead == 10


def test_a_step_of_one_rank_has_an_extent():
    record, _ = simulated("1f1b", UNIT, p=2, m=1).records
    assert extent(RecordedStep("none", linear(1), (record,))) == (0, 6)
    reduced = record._replace(reductions=(Reduction(0, 5, 9),))
    assert extent(RecordedStep("none", linear(1), (reduced,))) == (0, 9)


def recorded(timeline: Timeline) -> RecordedStep:
    """Return the step as a recorder would record it, with live bytes at the end of each action."""
    records = []
    for row in timeline.events:
        live, events = 0.0, []
        for action, start, end in row:
            live += timeline.costs.kept(action)
            events.append(Measured(action, start, end, round(live)))
        records.append(RankRecord(tuple(events), 0, 0))
    return RecordedStep("a", timeline.schedule.placement, tuple(records))


@pytest.mark.parametrize("name", ["zb-h1", "v-half", "1f1b", "interleaved"])
def test_costs_come_back(name):
    schedule = catalog.build(name, 3, 7).with_halved_backwards
    stages = [
        StageCosts(3 + s, 4 + s % 3, 2 + s % 2, 100 + 8 * s, 40 - s) for s in range(schedule.placement.stages)
    ]
    costs = Costs(tuple(stages), hop=0.5)
    step = recorded(simulate(schedule, costs))
    assert measured_costs([step]) == costs
    slower = Costs(
        tuple(replace(s, forward=9.0, activation=1.0, released_by_input_gradient=0.0) for s in stages), 1.5
    )
    mixed = measured_costs([step, recorded(simulate(schedule, slower))])
    # Bytes of the first step, seconds of the others.
    assert [s.forward for s in mixed.stages] == [9.0] * len(stages)
    assert [s.activation for s in mixed.stages] == [s.activation for s in stages]
    assert mixed.hop == 1.5


def test_an_input_gradient_may_keep_more_than_its_forward():
    """This happens under recomputation; a limit has to hold what is kept longest."""
    schedule = catalog.build("zb-h1", 2, 3)
    step = recorded(simulate(schedule, Costs((StageCosts(1, 1, 1, 10),) * 2)))
    more = tuple(
        record._replace(
            events=tuple(
                e._replace(live_bytes=e.live_bytes + 20 * (ends(record, n, Kind.I) - ends(record, n, Kind.W)))
                for n, e in enumerate(record.events)
            )
        )
        for record in step.records
    )
    costs = measured_costs([RecordedStep(step.name, step.placement, more)])
    assert {(s.activation, s.released_by_input_gradient) for s in costs.stages} == {(10, -20)}


def ends(record: RankRecord, number: int, kind: Kind) -> int:
    return sum(event.action.kind is kind for event in record.events[: number + 1])


def on_shared_cores(ideal: Timeline, *, with_processor_times: bool = True) -> RecordedStep:
    """Return the step with waits of random length in every action, which cost no processor time."""
    chance = random.Random(1)
    records = []
    for rank, row in enumerate(ideal.events):
        clock, events = 50.0, []
        for action, start, end in row:
            clock += 10 * chance.random()
            until = clock + end - start + 10 * chance.random()
            seconds = end - start if with_processor_times else None
            events.append(Measured(action, clock, until, 100 + rank, seconds))
            clock = until
        records.append(
            RankRecord(tuple(events), 900 + rank, 3, (Reduction(0, clock, clock + 1),), clock_error=0.1)
        )
    return RecordedStep("shared", ideal.schedule.placement, tuple(records))


@pytest.mark.parametrize("name", ["1f1b", "v-half", "interleaved"])
def test_the_replay_is_the_step_without_waits(name: str) -> None:
    schedule = catalog.build(name, 4, 8)
    stages = schedule.placement.stages
    ideal = simulate(schedule, Costs(tuple(StageCosts(1 + s / 7, 2, 0.5 + s / 3) for s in range(stages))))
    shared = on_shared_cores(ideal)
    replayed = on_own_cores(shared)
    assert shared.timeline().makespan > 1.5 * ideal.makespan
    timeline = replayed.timeline()
    for row, expected in zip(timeline.events, ideal.events, strict=True):
        assert [event.action for event in row] == [event.action for event in expected]
        assert [event[1:] for event in row] == [pytest.approx(event[1:]) for event in expected]
    assert timeline.makespan == pytest.approx(ideal.makespan)
    assert timeline.bubble == pytest.approx(ideal.bubble)
    assert [(r.peak_bytes, r.reductions, r.clock_error) for r in replayed.records] == [
        (900 + rank, (), 0.0) for rank in range(4)
    ]


def test_every_single_action_counts() -> None:
    """Two ranks, two microbatches of 1F1B, of which one forward takes longer than its kind does."""
    schedule = catalog.build("1f1b", 2, 2)
    step = on_shared_cores(simulate(schedule, Costs.unit(schedule.placement)))
    rank_0, rank_1 = step.records
    slow = rank_0.events[0]
    longer = rank_0._replace(events=(slow._replace(processor_seconds=4.0), *rank_0.events[1:]))
    replayed = on_own_cores(RecordedStep(step.name, step.placement, (longer, rank_1))).timeline()
    # Rank 1 does F 4 to 5, B to 7, F to 8, B to 10; rank 0 ends with its second backward.
    assert [event[1:] for event in replayed.events[1]] == [(4, 5), (5, 7), (7, 8), (8, 10)]
    assert replayed.makespan == 12


def test_a_step_of_devices_cannot_be_replayed() -> None:
    ideal = simulate(schedule := catalog.build("1f1b", 2, 2), Costs.unit(schedule.placement))
    with pytest.raises(ValueError, match="shared has no processor times, which are recorded on CPUs only"):
        on_own_cores(on_shared_cores(ideal, with_processor_times=False))


def test_inputs_from_before_the_recording_are_there() -> None:
    """Without a flush, microbatch 0 may have gone forward in the update before those that are recorded."""
    ideal = simulate(schedule := catalog.build("1f1b", 2, 3), Costs.unit(schedule.placement))
    step = on_shared_cores(ideal)
    rank_0, rank_1 = (
        record._replace(events=tuple(event for event in record.events if event.action[1:] != (Kind.F, 0)))
        for record in step.records
    )
    replayed = on_own_cores(RecordedStep(step.name, step.placement, (rank_0, rank_1))).timeline()
    assert [event[1:] for event in replayed.events[1]] == [(0, 2), (2, 3), (3, 5), (5, 6), (6, 8)]
    assert [event[1:] for event in replayed.events[0]] == [(0, 1), (2, 4), (4, 5), (5, 7), (8, 10)]
