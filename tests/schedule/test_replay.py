"""A step that ran on shared cores is replayed with the processor time of its actions."""

import random

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.recorded import Measured, RankRecord, RecordedStep, Reduction, on_own_cores
from megatron_pp_ext.schedule.simulate import Timeline, simulate


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
