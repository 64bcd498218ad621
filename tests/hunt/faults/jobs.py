"""Runs the ranks of a job, attends to the one that is hit, and says how all of them ended."""

import contextlib
import ctypes
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megatron_pp_ext.jobs import process
from megatron_pp_ext.jobs.command import torchrun
from tests.hunt.faults.rank import PATIENCE, Orders, be_rank
from tests.support import ranks

LIMIT = 15 * PATIENCE
"""A job that has not ended after so many seconds hangs: it takes ten, and more where the machine is busy."""

PAUSE = 1.0
CLEARING = 10.0
"""Seconds in which what the ranks started has to end after them."""

ROOT = Path(__file__).parents[3]
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


@dataclass
class Ended:
    """How a job ended.

    ``statuses`` are exit statuses by rank, or torchrun's, and None for what had to be ended. ``left`` are
    processes that outlived the job. ``hit`` is where the victim was; from then the end took ``seconds``.
    """

    statuses: dict[str, int | None] = field(default_factory=dict)
    story: str = ""
    results: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    hit: str | None = None
    seconds: float = 0.0


def run(world_size: int, orders: Orders, launcher: str = "forked", paused: bool = False) -> Ended:
    """Run the job to its end; ``paused`` lets a rank that stops go on after a moment."""
    start = _fork if launcher == "forked" else _torchrun
    with _orphans_come_here() as left:
        ended = start(world_size, orders, paused)
        at = time.time()
        ended.left = left()
    if orders.strike and orders.strike.file.exists():
        hit_at, _, ended.hit = orders.strike.file.read_text().splitlines()
        ended.seconds = at - float(hit_at)
    return ended


def _fork(world_size: int, orders: Orders, paused: bool) -> Ended:
    """Fork the ranks; one that is stopped for good counts as ended when the others have, and is killed."""
    ended = Ended()
    with ranks.started(be_rank, world_size, orders) as (running, files):

        def is_over() -> bool:
            for rank, pid in running.items():
                if pid > 0:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        running[rank] = -pid
                        ended.statuses[f"rank {rank}"] = os.waitstatus_to_exitcode(status)
            return all(pid < 0 or (_is_stopped(pid) and not paused) for pid in running.values())

        over = _wait(is_over, orders, paused)
        for rank, pid in running.items():
            if pid > 0:
                ended.statuses[f"rank {rank}"] = -signal.SIGSTOP if over else None
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                running[rank] = -pid
        ended.story = "\n".join(ranks.story(rank, file) for rank, file in enumerate(files))
        if all(status == 0 for status in ended.statuses.values()):
            ended.results = [pickle.loads(file.with_suffix(".result").read_bytes()) for file in files]
        running.clear()  # nothing is killed that outlived its rank: that is to be seen
    return ended


def _torchrun(world_size: int, orders: Orders, paused: bool) -> Ended:
    """Start the ranks as users do: torchrun ends the others when one has failed."""
    ended = Ended()
    with tempfile.TemporaryDirectory(prefix="orders-") as folder:
        file, log = Path(folder, "orders"), Path(folder, "log")
        file.write_bytes(pickle.dumps(orders))
        command = [*torchrun(world_size), "-m", "tests.hunt.faults.rank", str(file)]
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output, process.started(command, output, environment) as agent:
            _wait(lambda: agent.poll() is not None, orders, paused)
            ended.statuses["torchrun"] = agent.poll()
        ended.story = log.read_text(errors="replace")
    return ended


def _wait(is_over: Callable[[], bool], orders: Orders, paused: bool) -> bool:
    """Wait for the end of the job, and return whether it came before the limit."""
    end = time.monotonic() + LIMIT
    while not is_over():
        if time.monotonic() > end:
            return False
        if paused and orders.strike and orders.strike.file.exists():
            paused = False
            time.sleep(PAUSE)
            os.kill(int(orders.strike.file.read_text().splitlines()[1]), signal.SIGCONT)
        time.sleep(0.02)
    return True


def _is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


@contextlib.contextmanager
def _orphans_come_here() -> Iterator[Callable[[], list[str]]]:
    """Become the parent of processes whose own parent ends, and yield what names those that are left."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = psutil.Process()
    before = set(here.children(recursive=True))

    def left() -> list[str]:
        end = time.monotonic() + CLEARING
        while (others := _alive(here, before)) and time.monotonic() < end:
            time.sleep(0.1)
        names = []
        for other in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(f"{other.pid} ({other.name()}, {other.status()})")
                other.kill()
                other.wait()
        return names

    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield left
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _alive(here: psutil.Process, before: set[psutil.Process]) -> list[psutil.Process]:
    """Return the descendants that were not there ``before``; those that have ended are reaped instead."""
    alive = []
    for other in set(here.children(recursive=True)) - before:
        with contextlib.suppress(psutil.NoSuchProcess):
            if other.status() != psutil.STATUS_ZOMBIE:
                alive.append(other)
            elif other.ppid() == here.pid:
                other.wait()
    return alive
