"""Trainers that look for the loss on the last rank train under a V as under stock, bit for bit."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support import own_process
from tests.support.own_loop import assert_same
from tests.support.rl_loops import LOOPS, SCHEDULES
from tests.support.tiers import first


@cache
def results_of(ranks: int) -> list[dict]:
    """What so many ranks found; see ``rl_loops``.  A fixture would be made anew where tests change places."""
    with TemporaryDirectory() as folder:
        return own_process.found("rl_loops", Path(folder), str(ranks))


@pytest.fixture(params=first(1, [2, 4]))
def found(request: pytest.FixtureRequest) -> list[dict]:
    """What all ranks found."""
    return results_of(request.param)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_groups_of_a_chunk_are_the_true_ones(found: list[dict], name: str) -> None:
    """Trainers take the groups of a rank from its first chunk, and communicate by them."""
    ranks = list(range(len(found)))
    assert [rank[name, "groups"] for rank in found] == [[one, *ranks] * SCHEDULES[name] for one in ranks]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "stock"])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_the_loss_needs_is_on_the_last_rank(found: list[dict], name: str, loop: str) -> None:
    assert_same([rank[name, loop] for rank in found], [rank["stock", loop] for rank in found])
