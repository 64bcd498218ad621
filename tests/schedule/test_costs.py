import math

import pytest

from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind
from megatron_pp_ext.schedule.costs import Costs, HeadCosts, StageCosts


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
