"""What a rank has started ends with it, even if the rank is killed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_pp_ext import cpu
from megatron_pp_ext.cpu.checkpoint_writers import leave_no_orphans
from tests.support import training
from tests.support.ranks import run_ranks


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
    [
        "--async-save --use-persistent-ckpt-worker",
        "--async-save --exit-signal-handler --num-workers 1",
    ],
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
