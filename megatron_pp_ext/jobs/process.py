"""Processes of training runs: each has a session of its own, and ends with its ranks whatever happens.

torchrun gives every rank a session of its own, too, and a launcher that is killed does not end its ranks.
Every process that is started here therefore carries a mark in its environment, which all that come from it
inherit, and by which they are found at its end.
"""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from megatron_pp_ext.jobs.failure import reason

GRACE_SECONDS = 40
"""How long a process may take to end; torchrun gives its ranks 30 seconds."""

MARKS = "MPP_STARTED_BY"
"""The variable with the marks of all starts that a process comes from, with spaces."""


@contextmanager
def started(
    command: Sequence[str],
    output: IO[str] | IO[bytes] | int,
    environment: Mapping[str, str] | None = None,
    keep_open: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command`` with all that it prints going to ``output``; when the context is left, end it.

    ``environment`` is added to this process's own, and the descriptors ``keep_open`` are inherited.  What the
    command has started ends with it, in whatever session it is.  Raises OSError for a command that cannot be
    started.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {}), MARKS: f"{os.environ.get(MARKS, '')} {mark}".lstrip()},
        pass_fds=keep_open,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process, mark)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ask the group of ``process``, which ends its ranks, to end; kill what remains of the ``mark``."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(GRACE_SECONDS)
    last = time.monotonic() + GRACE_SECONDS
    while (remaining := list(_marked(mark))) and time.monotonic() < last:
        for process_of_run in remaining:
            with suppress(psutil.Error):
                process_of_run.kill()
        time.sleep(0.02)
    process.poll()


def _marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the processes that come from the start with this mark and have not ended."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it is gone by now, or another user's
            if mark in process.environ().get(MARKS, "").split():
                yield process


def run(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    keep_open: Sequence[int] = (),
) -> int | None:
    """Run ``command`` with its output in ``log``.

    Return its exit status, or None if it was ended because ``timeout`` seconds were over.
    """
    with log.open("wb") as output, started(command, output, environment, keep_open) as process:
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None


def run_together(
    commands: Mapping[int, tuple[Sequence[str], Mapping[str, str]]], logs: Mapping[int, Path]
) -> None:
    """Run one command for each rank at the same time, each with its environment and its log.

    Raises ValueError with the reason once a command has failed, and ends the others.
    """
    with ExitStack() as stack:
        running = {}
        for rank, (command, environment) in commands.items():
            output = stack.enter_context(logs[rank].open("wb"))
            running[rank] = stack.enter_context(started(command, output, environment))
        for rank, process in running.items():
            if status := process.wait():
                cause = reason(logs[rank].read_text(encoding="utf-8", errors="replace"))
                raise ValueError(f"the run of rank {rank} ended with status {status}: {cause}")
