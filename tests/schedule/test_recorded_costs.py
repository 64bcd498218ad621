"""The costs measured in a step that was simulated from costs are these costs again."""

from dataclasses import replace

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.recorded import Measured, RankRecord, RecordedStep, measured_costs
from megatron_pp_ext.schedule.simulate import Timeline, simulate


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
