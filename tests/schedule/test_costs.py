import math
from dataclasses import replace

import pytest

from megatron_pp_ext.compiler.bounds import lower_bound
from megatron_pp_ext.compiler.limits import kept_by_1f1b
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind
from megatron_pp_ext.schedule.costs import Costs, HeadCosts, StageCosts, UnitCosts
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.schedule.timing import ScheduleTimer


def test_a_whole_backward_takes_both_halves_and_releases_everything():
    stage = StageCosts(3, 4, 5, activation=10, released_by_input_gradient=4)
    assert [stage.seconds(kind) for kind in OF_STAGES] == [3, 4, 5, 9]
    assert [stage.kept(kind) for kind in OF_STAGES] == [10, -4, -6, -10]


def test_a_weight_gradient_hides_messages_of_an_input_gradient():
    """A whole backward hides its own."""
    stage, short = StageCosts(3, 4, 5, hidden=2), StageCosts(3, 4, 1)
    assert [stage.seconds(kind) for kind in OF_STAGES] == [3, 4, 5, 7]
    costs = Costs((stage, short))
    assert costs.merged(1).stages == (StageCosts(6, 8, 6, 2, hidden=2),)


@pytest.mark.parametrize(("hidden", "weight_gradient"), [(5, 6), (4, 4), (3, 2)])
def test_no_more_is_hidden_than_there_is(hidden, weight_gradient):
    with pytest.raises(ValueError, match=rf"hidden is {hidden}, .*: lower it"):
        StageCosts(1, 4, weight_gradient, hidden=hidden)


def test_no_more_is_lent_than_there_is():
    with pytest.raises(ValueError, match=r"lent is 3, but a W of 2 lends no more than it takes: lower it"):
        StageCosts(1, 4, 2, lent=3)


@pytest.mark.parametrize("field", ["forward", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("value", [0, -1.5, math.nan, math.inf])
def test_a_time_must_be_above_zero(field, value):
    times = {"forward": 1.0, "input_gradient": 1.0, "weight_gradient": 1.0, field: value}
    with pytest.raises(ValueError, match=rf"{field} is {value}, .*above 0") as error:
        StageCosts(**times)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [-1, math.nan])
def test_memory_and_hop_may_be_zero_but_not_less(value):
    with pytest.raises(ValueError, match="activation is"):
        StageCosts(1, 1, 1, activation=value)
    with pytest.raises(ValueError, match=r"Costs\.hop is"):
        Costs((StageCosts(1, 1, 1),), hop=value)
    with pytest.raises(ValueError, match=r"Costs\.message is"):
        Costs((StageCosts(1, 1, 1),), message=value)
    Costs((StageCosts(1, 1, 1, activation=0),), hop=0, message=0)


def test_the_times_of_a_whole_rank_are_divided_among_its_chunks():
    costs = Costs.per_rank(3, 2, forward=2.0, input_gradient=3.0, weight_gradient=4.0, hop=0.25)
    assert costs == Costs((StageCosts(1.0, 1.5, 2.0, activation=0.5),) * 6, hop=0.25)


@pytest.mark.parametrize(("ranks", "microbatches", "hop"), [(4, 8, 0.5), (8, 8, 3.0)])
def test_ranks_that_wait_for_their_messages(ranks, microbatches, hop):
    """A microbatch takes two messages more on every rank between the ends, and three fall away at these."""
    schedule = catalog.build("1f1b", ranks, microbatches)
    costs = Costs.uniform(schedule.placement, forward=1.0, input_gradient=1.0, weight_gradient=1.0, hop=hop)
    waiting = simulate(schedule, costs.waiting_for_messages(schedule.placement)).makespan
    assert waiting == (microbatches + ranks - 1) * (3 + 2 * hop) - 3 * hop
    assert waiting > simulate(schedule, costs).makespan
    at_once = simulate(schedule, costs.waiting_for_messages(schedule.placement, at_once=True)).makespan
    assert at_once == waiting - (microbatches + ranks - 1) * hop + 1.5 * hop


def test_a_whole_backward_is_one_action():
    costs = Costs((StageCosts(1, 2, 3, hidden=0.5),), head=HeadCosts(1, 2)).longer_by(0.25)
    assert [costs.stages[0].seconds(kind) for kind in OF_STAGES] == [1.25, 2.25, 3.25, 4.75]
    assert (costs.head.scores, costs.head.weight_gradient) == (1.25, 2.25)


def test_no_rank_waits_for_a_message_to_itself():
    placement = catalog.build("v-half", 2, 4).placement
    costs = Costs.uniform(placement, forward=1.0, input_gradient=1.0, weight_gradient=1.0, hop=0.5)
    waiting = costs.waiting_for_messages(placement).stages
    assert [stage.forward for stage in waiting] == [1.5, 1.0, 1.5, 1.0]
    assert [stage.input_gradient for stage in waiting] == [1.0, 1.5, 1.0, 1.5]


def test_an_output_layer_is_the_last_stages_or_all_ranks():
    plain = Costs((StageCosts(1.0, 2.0, 3.0, 4.0, 0.5),) * 4, hop=0.125, message=7.0)
    last = StageCosts(1.75, 2.75, 3.75, 4.0, 0.5)
    assert plain.with_output_layer(0.75) == Costs((*plain.stages[:3], last), 0.125, 7.0)
    shared = plain.with_split_head(0.75, 3)
    assert shared == Costs(plain.stages, 0.125, 7.0, HeadCosts(0.5, 0.25, 0.0, 0.125, 0.25))
    assert shared.merged(2).head == shared.head


@pytest.mark.parametrize("field", ["scores", "weight_gradient"])
def test_work_on_a_vocabulary_takes_time(field):
    with pytest.raises(ValueError, match=rf"HeadCosts\.{field} is 0, but must be .* above 0"):
        HeadCosts(**{"scores": 1, "weight_gradient": 1, field: 0})


def test_work_on_a_vocabulary_is_a_ranks():
    costs = Costs((StageCosts(1, 1, 1),) * 2)
    for kind in (Kind.S, Kind.T):
        with pytest.raises(ValueError, match=r"for which no costs are given: set Costs\.head"):
            costs.seconds(Action(0, kind, 0))
        with pytest.raises(ValueError, match="is no work of a stage"):
            costs.stages[0].seconds(kind)
        with pytest.raises(ValueError, match="is no work of a stage"):
            costs.stages[0].kept(kind)


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
