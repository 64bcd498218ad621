"""Processes of training runs: each has a session of its own, and ends with its ranks whatever happens."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from megatron_pp_ext.jobs.failure import reason

GRACE_SECONDS = 40
"""How long a process may take to end; torchrun gives its ranks 30 seconds."""


@contextmanager
def started(
    command: Sequence[str],
    output: IO[str] | IO[bytes] | int,
    environment: Mapping[str, str] | None = None,
    keep_open: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command`` with all that it prints going to ``output``, and end it when the context is left.

    ``environment`` is added to this process's own, and the descriptors ``keep_open`` are inherited.  Raises
    OSError for a command that cannot be started.
    """
    process = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        pass_fds=keep_open,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process group of ``process``; torchrun's ranks have sessions of their own, and it ends them."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(GRACE_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


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
                why = reason(logs[rank].read_text(encoding="utf-8", errors="replace"))
                raise ValueError(f"the run of rank {rank} ended with status {status}: {why}")
