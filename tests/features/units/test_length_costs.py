"""What microbatches cost by the lengths of their documents."""

import pytest

from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts

ONE = Costs((StageCosts(2.0, 3.0, 1.0, activation=4.0, released_by_input_gradient=1.0),), hop=0.5)
TWO = Microbatches.of([[100, 300], [1000]])


def times(costs, microbatch):
    return [costs.seconds(Action(0, kind, microbatch)) for kind in (Kind.F, Kind.I, Kind.W)]


def test_attention_goes_by_squares():
    """100 tokens take 2, 3 and 1; a document of 200 tokens has as much attention as all else."""
    costs = LengthCosts.with_attention(ONE, 100, equal_at=200).of(TWO)
    assert times(costs, 0) == pytest.approx([2 * 4 + 2 * 5, 3 * 4 + 2.5 * 2 * 5, 4])
    assert times(costs, 1) == pytest.approx([2 * 10 + 2 * 50, 3 * 10 + 2.5 * 2 * 50, 10])
    assert costs.kept(Action(0, Kind.F, 1)) == pytest.approx(40)
    assert costs.kept(Action(0, Kind.I, 1)) == pytest.approx(-10)
    assert (costs.tokens, costs.hop) == ((400, 1000), 0.5)
    assert costs.stages[0].activation == pytest.approx(4 * 7)


def test_measured_costs_are_met_at_their_own_length():
    again = LengthCosts.measured(ONE, 500, documents=2, equal_at=10_000).of(Microbatches.of([[500, 500]]))
    assert times(again, 0) == pytest.approx([2, 3, 1])
    longer = LengthCosts.measured(ONE, 500, documents=2, equal_at=10_000).of(Microbatches.of([[1000]]))
    assert times(longer, 0)[2] == pytest.approx(1)
    assert times(longer, 0)[0] > 2


def known(microbatches: Microbatches) -> Costs:
    return LengthCosts.with_attention(ONE, 100, equal_at=700).of(microbatches)


def test_two_measurements_say_what_is_attention():
    short, long = (known(Microbatches.of([one])).units[0] for one in ([500, 500], [1000]))
    found = LengthCosts.through(short, 2, long, 1000).of(TWO)
    for microbatch in range(2):
        assert times(found, microbatch) == pytest.approx(times(known(TWO), microbatch))
    with pytest.raises(ValueError, match="for 1 shorter documents"):
        LengthCosts.through(short, 1, long, 1000)


def test_costs_are_fitted_to_a_measured_step():
    some = Microbatches.of([[100, 300], [1000], [50] * 9, [700, 20]])
    found = LengthCosts.fitted(some, known(some)).of(TWO)
    for microbatch in range(2):
        assert times(found, microbatch) == pytest.approx(times(known(TWO), microbatch))
    with pytest.raises(ValueError, match="4 microbatches were measured, but there are lengths of 2"):
        LengthCosts.fitted(TWO, known(some))


def test_equal_lengths_go_by_tokens():
    alike = Microbatches.of([[100]] * 3)
    found = LengthCosts.fitted(alike, known(alike))
    assert found.stages[0].per_square == (0, 0, 0)
    assert times(found.of(alike), 0) == pytest.approx(times(known(alike), 0))


@pytest.mark.parametrize("equal_at", [0, float("inf"), -1])
def test_a_length_that_is_none(equal_at):
    with pytest.raises(ValueError, match="give more than 0"):
        LengthCosts.with_attention(ONE, 100, equal_at)
