"""A rank's own part of what a group has gathered: cut, kept, and gathered again."""

import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.split import OwnPart
from tests.support.ranks import run_ranks

ROWS, COLUMNS = 12, 8


def cut_and_gather(rank, dim, length):
    """The whole, its part, and what comes back; every rank has the same whole."""
    dist.init_process_group("gloo")
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    part = OwnPart.cut(whole, dist.group.WORLD, dim, length)
    part.start()
    part.start()  # as one that is under way already
    again = part.take()
    return whole, part.part, again, part.take()


@pytest.mark.parametrize(
    ("dim", "length"), [(0, None), (1, None), (0, 8), (1, 4)], ids=["rows", "columns", "padded", "both"]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_was_cut_comes_back_on_every_rank(ranks, dim, length):
    """Padding, which belongs to no rank, comes back as zeros."""
    divided = length or (ROWS, COLUMNS)[dim]
    for rank, (whole, part, *gathered) in enumerate(run_ranks(cut_and_gather, ranks, dim, length)):
        expected = torch.zeros_like(whole)
        expected.narrow(dim, 0, divided).copy_(whole.narrow(dim, 0, divided))
        assert torch.equal(part, whole.narrow(dim, 0, divided).chunk(ranks, dim)[rank])
        # A view would keep the memory of the whole.
        assert (
            part.untyped_storage().nbytes()
            == part.nbytes
            == 4 * expected.narrow(dim, 0, divided).numel() / ranks
        )
        assert all(torch.equal(again, expected) for again in gathered)
