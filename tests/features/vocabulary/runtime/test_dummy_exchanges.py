"""A rank that runs alone exchanges numbers to compute with."""

import torch
import torch.distributed as dist

from megatron_pp_ext.features.vocabulary.runtime.exchanges import DummyExchanges
from tests.support.ranks import run_ranks

SHAPE = (3, 2, 4)
NUMBERS = torch.arange(24.0).reshape(SHAPE)


def dummy_exchanges(rank: int) -> None:
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    exchanges = DummyExchanges(world, world, rows=50)
    tokens, numbers = torch.full((400,), -1), torch.full(SHAPE, torch.nan)
    for home in (0, 1):
        exchanges.broadcast(tokens, home).wait()
        exchanges.broadcast(numbers, home).wait()
        # What rank 0 broadcasts itself is as it was.
        assert bool((tokens == -1).all()) is bool(numbers.isnan().all()) is (home == 0)
    assert 0 <= tokens.min() < 5 < 45 < tokens.max() < 50
    assert numbers.any() and numbers.isfinite().all()
    whole, gathering = exchanges.gather(NUMBERS)
    gathering.wait()
    assert torch.equal(whole, NUMBERS[None])
    mine = NUMBERS.clone()
    exchanges.reduce(mine, 1).wait()
    assert torch.equal(mine, NUMBERS)


def test_dummy_exchanges_are_numbers_to_compute_with() -> None:
    run_ranks(dummy_exchanges, 1)
