"""Run a function on several ranks, each forked from this process.

Importing torch and Megatron takes about ten seconds. A forked rank has both from the start, and shares their
memory, so a test on four ranks takes seconds. Everything a rank does to module state, such as Megatron's
global arguments and process groups, is gone with the rank.

    losses = run_ranks(function, 4, argument)     # [function(0, argument), ..., function(3, argument)]
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import pkgutil
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numba

import megatron_pp_ext
from megatron_pp_ext import cpu

cpu.install()  # before anything imports Megatron

import torch.distributed as dist  # noqa: E402

# Otherwise every rank looks through all installed packages for what registers gloo.
if hasattr(dist.Backend, "_ensure_backend_registered"):
    dist.Backend._ensure_backend_registered("gloo")

OUTPUT_LINES = 30
CRASH = "Fatal Python error"
"""What faulthandler writes first."""

ROOMS = ("compiler", "costs", "features", "job", "runtime")
"""The folders of the package from which a job imports what its flags need."""

OF_COMMANDS = (".cli", ".planner")
"""A feature's modules that no training imports."""

GRACE_SECONDS = 2.0
HANG_SECONDS = 600.0
"""A job takes seconds; one that has not ended after so many hangs, however slow the machine is."""


class RankError(AssertionError):
    """A rank failed, or did not finish in time."""


def import_ahead(*rooms: str) -> None:
    """Import all of the package's ``rooms``, and numba's tables of what it can compile.

    Each rank would do both by itself: a tenth of a second for a job's modules, and one for its first loop.
    """
    for room in rooms:
        folder = Path(megatron_pp_ext.__file__).with_name(room)
        for module in pkgutil.walk_packages([str(folder)], f"{megatron_pp_ext.__name__}.{room}."):
            if not module.name.endswith(OF_COMMANDS):
                importlib.import_module(module.name)
    numba.njit(lambda: 0)()


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = HANG_SECONDS
) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``world_size`` forked processes and return their results.

    The environment of torch.distributed is set; ``fn`` makes the process group. Results are pickled, so
    they may hold tensors but not modules with hooks. When a rank raises, or when ``timeout`` seconds are
    over, every rank is killed and RankError tells the tracebacks and the last lines of output.
    """
    with started(fn, world_size, *args) as (running, files):
        failed, problem = _wait(running, timeout)
        if problem:
            raise RankError("\n\n".join([problem, *(story(rank, files[rank]) for rank in failed)]))
        return [pickle.loads(file.with_suffix(".result").read_bytes()) for file in files]


@contextlib.contextmanager
def started(
    fn: Callable[..., Any], world_size: int, *args: Any
) -> Iterator[tuple[dict[int, int], list[Path]]]:
    """Fork processes that call ``fn(rank, *args)``; kill them, and their children, at the context's end.

    Yield their ids by rank, where whoever reaps one makes it negative, and the names of each rank's files
    without the endings: .output, and .result or .traceback once it has ended.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        files = [Path(folder, str(rank)) for rank in range(world_size)]
        port = _free_port()
        sys.stdout.flush()
        sys.stderr.flush()
        running: dict[int, int] = {}
        try:
            for rank in range(world_size):
                pid = os.fork()
                if pid == 0:
                    _be_rank(fn, rank, world_size, args, files[rank], port)
                running[rank] = pid
            yield running, files
        finally:
            for pid in running.values():
                _kill(pid)


def _be_rank(
    fn: Callable[..., Any], rank: int, world_size: int, args: tuple, files: Path, port: int
) -> NoReturn:
    """Run ``fn`` as a rank and end the process: nothing of pytest may run on in it."""
    status = 1
    gc.freeze()  # collections would go through all that was imported: half of what a small job takes
    try:
        os.setpgid(0, 0)  # the rank and what it starts end together
        _send_output_to(files.with_suffix(".output"))
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        if "lo" in (name for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no look-up of this machine's name
        result = fn(rank, *args)
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves takes its connections with it
        files.with_suffix(".result").write_bytes(pickle.dumps(result))
        status = 0
    except BaseException:
        files.with_suffix(".traceback").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _send_output_to(file: Path) -> None:
    """Send the output of this process and its libraries to ``file``."""
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.enable(sys.stderr)  # pytest's writes where nobody looks for the story of a rank


def _wait(running: dict[int, int], timeout: float) -> tuple[list[int], str]:
    """Wait for all ranks; return the ones to report, and in one line the problem.

    The rank that fails first is the one to read. Others follow when its connections close: they get a
    moment, as two ranks may fail by themselves.
    """
    end = time.monotonic() + timeout
    alive, failed = dict(running), []
    while alive and time.monotonic() < end:
        for rank, pid in list(alive.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del alive[rank]
                running[rank] = -pid  # reaped; what it started may be left
                if status != 0:
                    if not failed:
                        end = min(end, time.monotonic() + GRACE_SECONDS)
                    failed.append(rank)
        time.sleep(0.005)
    if failed:
        return failed, f"rank {failed[0]} failed"
    if alive:
        return sorted(alive), f"ranks {sorted(alive)} did not finish in {timeout:g} seconds"
    return [], ""


def _kill(pid: int) -> None:
    """Kill a rank and its children, and reap it unless ``pid`` is negative: then that is done."""
    try:
        os.killpg(abs(pid), signal.SIGKILL)
    except ProcessLookupError:
        if pid > 0:
            os.kill(pid, signal.SIGKILL)  # not yet the leader of a group of its own
    if pid > 0:
        os.waitpid(pid, 0)


def story(rank: int, files: Path) -> str:
    """A rank's last output, and where it raised."""
    parts = [f"--- rank {rank} ---"]
    for suffix, lines in ((".output", OUTPUT_LINES), (".traceback", None)):
        file = files.with_suffix(suffix)
        text = file.read_text(errors="replace").splitlines() if file.exists() else []
        crash = next((at for at, line in enumerate(text) if line.startswith(CRASH)), len(text))
        parts += text[crash:] or (text[-lines:] if lines else text)
    return "\n".join(parts)


def _free_port() -> int:
    """Find a free port below the kernel's own range: one of these could be taken before its use."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
