"""The helper that tests on several ranks use."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, run_ranks


def test_results_come_back_in_rank_order() -> None:
    def gather(rank: int, offset: float) -> tuple[int, torch.Tensor]:
        dist.init_process_group("nccl")  # the stand-in makes it gloo
        numbers = torch.full((2,), rank + offset, device="cuda")
        dist.all_reduce(numbers)
        return rank, numbers

    results = run_ranks(gather, 3, 0.5)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(numbers, torch.tensor([4.5, 4.5])) for _, numbers in results)


def test_a_failure_reports_its_rank_and_what_was_printed() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            print("about to fail")
            raise ValueError("no such luck")
        signal.pause()

    # Rank 0 would never end: it is killed, not waited for.
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*about to fail.*ValueError: no such luck"):
        run_ranks(fail, 2)


def test_a_rank_that_dies_silently_is_a_failure_and_one_that_does_not_finish_is_killed() -> None:
    with pytest.raises(RankError, match="rank 0 failed"):
        run_ranks(lambda rank: os._exit(3), 1)
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not finish in 0.5 seconds"):
        run_ranks(lambda rank: signal.pause(), 2, timeout=0.5)


def test_state_stays_in_the_rank() -> None:
    def spoil(rank: int) -> None:
        os.environ["SPOILED"] = "1"

    run_ranks(spoil, 1)
    assert "SPOILED" not in os.environ
