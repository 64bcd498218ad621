import math

import pytest

from megatron_pp_ext.schedule.actions import OF_STAGES
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import v


def test_a_whole_backward_takes_both_halves_and_releases_everything():
    stage = StageCosts(3, 4, 5, activation=10, released_by_input_gradient=4)
    assert [stage.seconds(kind) for kind in OF_STAGES] == [3, 4, 5, 9]
    assert [stage.released(kind) for kind in OF_STAGES] == [0, 4, 6, 10]


def test_unit_costs_count_chunks():
    costs = Costs.unit(v(3))
    assert costs.stages == (StageCosts(1, 1, 1),) * 6
    assert costs.hop == 0


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


def test_an_input_gradient_cannot_release_more_than_there_is():
    with pytest.raises(ValueError, match=r"released_by_input_gradient is 2, more than the activation of 1"):
        StageCosts(1, 1, 1, activation=1, released_by_input_gradient=2)


def test_a_pipeline_has_stages():
    with pytest.raises(ValueError, match="one StageCosts for each stage"):
        Costs(())
