"""Pipelines that share experts, and whose sequences have other lengths, train in slices."""

import pytest

from tests.support import own_loop, own_loop_experts, own_process

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What all ranks found; see ``tests.support.own_loop_experts``."""
    return own_process.found("own_loop_experts", tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("name", own_loop_experts.SCHEDULES)
def test_trains_and_evaluates_as_whole_microbatches(found: list[dict], name: str) -> None:
    ours, stock = ([rank[one] for rank in found] for one in (name, "stock"))
    for (record, evaluated), (of_stock, evaluated_by_stock) in zip(ours, stock, strict=True):
        for one, other in zip(record.losses, of_stock.losses, strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        assert evaluated == pytest.approx(evaluated_by_stock, rel=1e-4)
    assert sum(bool(evaluated) for _, evaluated in ours) == 2
    for replica in (0, 1):
        of_replica = ([record for record, _ in ranks[replica::2]] for ranks in (ours, stock))
        own_loop.assert_close_gradients(*of_replica)
