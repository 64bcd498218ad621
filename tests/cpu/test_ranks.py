"""The helper that tests on several ranks use."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_pp_ext import cpu
from megatron_pp_ext.cpu.checkpoint_writers import leave_no_orphans
from tests.support import training
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


def kill_once_ready(be_victim: Callable[[int], object]) -> None:
    """Fork, and kill the child once it or what it has started writes to the pipe that ``be_victim`` gets.

    Returns when all of them have ended, since only then is nobody left who could write; else it hangs.
    """
    reading, writing = os.pipe()
    victim = os.fork()
    if victim == 0:
        try:
            be_victim(writing)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1), "it ended before it was ready"
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    while os.read(reading, 1):
        pass


@pytest.mark.parametrize(
    "flags",
    ["--async-save --use-persistent-ckpt-worker", "--async-save --exit-signal-handler --num-workers 1"],
)
def test_nothing_outlives_a_rank_that_is_killed_while_it_saves(flags: str, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path), "--save-interval", "1", "--ckpt-format", "torch_dist", *flags.split()]
    argv = cpu.with_cpu_flags([*training.TINY, "--mock-data", *save])

    def train(ready: int) -> None:
        def never_end_writing(*args: Any, **kwargs: Any) -> None:
            os.write(ready, b"+")
            signal.pause()

        FileSystemWriterAsync.write_preloaded_data = staticmethod(never_end_writing)  # type: ignore
        training._train(0, argv, training.initialize_by_layer, None)

    run_ranks(lambda rank: kill_once_ready(train), 1)


def test_nor_does_what_its_children_have_started() -> None:
    def start_a_grandchild(ready: int) -> None:
        leave_no_orphans()
        leave_no_orphans()
        if os.fork() == 0 and os.fork() == 0:
            os.write(ready, b"+")
        signal.pause()

    run_ranks(lambda rank: kill_once_ready(start_a_grandchild), 1)
