"""Costs of each microbatch: what takes and keeps them, memory limits and lower bounds."""

from dataclasses import replace

import pytest

from megatron_pp_ext.compiler.bounds import lower_bound
from megatron_pp_ext.compiler.limits import kept_by_1f1b
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts, UnitCosts
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.schedule.timing import ScheduleTimer


def of_sizes(stages: int, *sizes: float, hop: float = 0.0) -> UnitCosts:
    """Microbatches whose F, I and W take their size, and keep as much."""
    units = tuple(Costs((StageCosts(size, size, size, activation=size),) * stages) for size in sizes)
    mean = sum(sizes) / len(sizes)
    whole = StageCosts(mean, mean, mean, activation=mean)
    return UnitCosts((whole,) * stages, hop, units=units, tokens=tuple(map(int, sizes)))


def test_a_step_by_hand():
    """Two ranks, microbatches of 1 and 3: F0 F1 on rank 0, and rank 1 does F0 B0 F1 B1."""
    timeline = simulate(catalog.build("1f1b", 2, 2), of_sizes(2, 1, 3))
    assert [(start, end) for _, start, end in timeline.events[1]] == [(1, 2), (2, 4), (4, 7), (7, 13)]
    assert timeline.makespan == 19
    assert timeline.peak_activations == (4, 3)
    assert timeline.peak_microbatches == (2, 1.5), "in mean microbatches"
    assert timeline.bubble == pytest.approx(1 - 2 * 12 / (2 * 19))


def test_the_order_of_microbatches_counts():
    schedule, costs = catalog.build("1f1b", 2, 2), of_sizes(2, 1, 3)
    assert simulate(schedule, costs.ordered((1, 0))).makespan == 20
    assert costs.ordered((1, 0)).tokens == (3, 1)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "interleaved"])
def test_equal_units_are_as_their_mean(name):
    schedule = catalog.build(name, 4, 8)
    units = of_sizes(schedule.placement.stages, *[2] * 8, hop=0.25)
    alike = Costs(units.stages, units.hop)
    one, other = simulate(schedule, units), simulate(schedule, alike)
    assert one.events == other.events
    assert one.peak_activations == other.peak_activations
    assert ScheduleTimer(schedule).spans(units) == ScheduleTimer(schedule).spans(alike)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "interleaved", "dualpipe-v"])
def test_no_step_is_below_its_bound(name):
    schedule = catalog.build(name, 4, 8)
    costs = of_sizes(schedule.placement.stages, 1, 5, 2, 2, 9, 1, 3, 4, hop=0.5)
    makespan = simulate(schedule, costs).makespan
    bound = lower_bound(schedule.placement, 8, costs, [1e9] * 4)
    assert 0.3 * makespan < bound <= makespan


def test_1f1b_keeps_the_heaviest_microbatches_in_a_row():
    costs = of_sizes(4, 1, 5, 2, 9, 3, 1)
    assert kept_by_1f1b(2, 6, costs) == 2 * (9 + 3), "of all two stages of a rank"
    for microbatches in (2, 6):
        some = replace(costs, units=costs.units[:microbatches], tokens=costs.tokens[:microbatches])
        peaks = simulate(catalog.build("1f1b", 4, microbatches), some).peak_activations
        assert kept_by_1f1b(4, microbatches, some) == max(peaks)


def test_stages_merge_for_every_unit():
    merged = of_sizes(4, 1, 3).merged(2)
    assert [unit.stages[0].forward for unit in merged.units] == [2, 6]
    assert merged.kept(Action(1, Kind.F, 1)) == 6
    assert len(merged.stages) == 2


def test_what_is_wrong_is_named():
    costs = of_sizes(2, 1, 3)
    with pytest.raises(ValueError, match="0F2 is of a microbatch without costs, there are 2"):
        simulate(catalog.build("1f1b", 2, 3), costs)
    with pytest.raises(ValueError, match="unit 0 has costs of 2 stages, but there are 3"):
        replace(costs, stages=(StageCosts(1, 1, 1),) * 3)
    with pytest.raises(ValueError, match="tokens of 1 microbatches and costs of 2"):
        replace(costs, tokens=(1,))
