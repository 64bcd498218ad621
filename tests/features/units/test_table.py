"""The table of units is that of their costs, whichever way it is made."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.features.units.table import table_by_length, table_of
from megatron_pp_ext.features.units.units import cut, whole
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts

DOCUMENTS = [[700, 40], [3000], [10] * 5]


def rates() -> LengthCosts:
    """Stages that differ, whose W hide messages, with copies and a split head."""
    stages = tuple(
        StageCosts(float(n), 2.0 * n, 1.5 * n, 3.0, 1.0, copy=0.2, hidden=0.4 * n) for n in (1, 2, 3, 4)
    )
    costs = Costs(stages, hop=0.3).with_split_head(0.5, 2)
    return LengthCosts.with_attention(replace(costs, pair=0.8), 100, equal_at=500)


@pytest.mark.parametrize("units", [whole(DOCUMENTS), cut(DOCUMENTS, 400)])
@pytest.mark.parametrize("overhead", [0.0, 128.0])
def test_a_table_by_length_has_what_the_costs_of_units_say(units, overhead) -> None:
    by_length = table_by_length(rates(), units, overhead)
    of_costs = table_of(rates().of(units, overhead))
    for ours, theirs in zip(by_length, of_costs, strict=True):
        assert np.allclose(ours, theirs, rtol=1e-12)


def test_equal_units_have_one_column_each() -> None:
    costs = Costs.per_rank(2)
    table = table_of(costs, 3)
    assert table.is_of_alike and table.seconds.shape[1:] == (2, 3)
    assert table.work.tolist() == pytest.approx([6.0] * 3)


def test_durations_follow_the_order() -> None:
    table = table_by_length(rates(), whole(DOCUMENTS))
    one, other = (table.durations(np.array(order)) for order in ([0, 1, 2], [2, 0, 1]))
    assert other == (one[2], one[0], one[1])
    assert len(one[0]) == 4 * 4


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


@pytest.mark.parametrize("equal_at", [0, float("nan"), -1])
def test_a_length_that_is_none(equal_at):
    with pytest.raises(ValueError, match=r"equal_at is .*above 0"):
        LengthCosts.with_attention(ONE, 100, equal_at)
