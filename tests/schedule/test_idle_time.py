"""Idle time by cause: the parts sum up to the whole, and each has the cause that it is named after."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import linear
from megatron_pp_ext.schedule.recorded import (
    Measured,
    RankRecord,
    RecordedStep,
    Reduction,
    extent,
    idle_times,
    message_seconds,
)
from megatron_pp_ext.schedule.simulate import simulate

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
