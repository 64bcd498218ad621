"""A step after one that failed is as good as the first, wherever that failed, and with every feature."""

from pathlib import Path

import pytest
import torch

from tests.support import own_process
from tests.support.own_loop import assert_close_gradients, assert_same
from tests.support.own_loop_failures import CASES
from tests.support.rounding import of_losses
from tests.support.tiers import wide

FIRST = {"split"}


@pytest.mark.parametrize("name", [name if name in FIRST else wide(name) for name in CASES])
def test_the_next_step_is_as_good_as_the_first(name: str, tmp_path: Path) -> None:
    found = own_process.found("own_loop_failures", tmp_path, name)
    firsts, stock = ([rank[what] for rank in found] for what in ("first", "stock"))
    options = CASES[name].install
    if not options or "offload" in options:
        assert_same(firsts, stock)
    else:  # sums have another order
        assert firsts[-1].losses[0] == pytest.approx(stock[-1].losses[0], rel=of_losses(1))
        if "vocabulary" not in options:  # of which each rank has rows
            assert_close_gradients(firsts, stock)
    for place in CASES[name].places:
        failures, steps, left = zip(*(rank["failures"][place] for rank in found), strict=True)
        assert place in failures, f"no rank failed at {place}: {failures}"
        assert all(failures), f"a rank went on without the other one at {place}"
        assert left == (0, 0)
        assert [step.losses for step in steps] == [first.losses for first in firsts], place
        for step, first in zip(steps, firsts, strict=True):
            ours, expected = step.gradients, first.gradients
            assert [one for one in expected if not torch.equal(ours[one], expected[one])] == [], place
