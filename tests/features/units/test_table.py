"""The table of units is that of their costs, whichever way it is made."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.features.units.table import table_by_length, table_of
from megatron_pp_ext.features.units.units import cut, whole
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
