"""How benchmarks measure: in turns, in processes of their own, and with training runs on two CPU cores."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

from megatron_pp_ext.jobs import command, process
from megatron_pp_ext.jobs.failure import reason

RANKS, TOKENS = 2, 256
MADE_UP = shlex.split(
    "--attention-dropout 0 --hidden-dropout 0 --lr-decay-style constant --tokenizer-type NullTokenizer "
    "--make-vocab-size-divisible-by 1 --mock-data --eval-iters 0 --eval-interval 1000 --log-interval 1"
)
"""Training on made-up data without anything random."""
COMMON = MADE_UP + shlex.split(
    f"--pipeline-model-parallel-size {RANKS} --micro-batch-size 1 --num-layers 8 --num-attention-heads 8 "
    f"--seq-length {TOKENS} --max-position-embeddings {TOKENS} --lr 1e-3"
)
"""A GPT on two ranks, without its hidden size, vocabulary, batch and schedule."""

MPP = [sys.executable, "-c", "from megatron_pp_ext.cli import app; app()"]
"""The start of a command line of ``mpp``."""


def in_turns[Key, Value](
    ways: Mapping[Key, Callable[[], Value]],
    rounds: int,
    seconds: float = 0.0,
    warm_up: int = 0,
    title: str | None = None,
) -> dict[Key, list[Value]]:
    """Call each of ``ways`` once a round, so that a slow moment of the machine meets all of them.

    There are at least ``rounds`` rounds and ``seconds`` seconds of them, after ``warm_up`` rounds that do not
    count.  ``title`` names a progress bar.
    """
    results: dict[Key, list[Value]] = {way: [] for way in ways}
    for _ in range(warm_up):
        for measure in ways.values():
            measure()
    end, done = time.perf_counter() + seconds, 0
    while done < rounds or time.perf_counter() < end:
        done += 1
        for way in track(ways, f"{title}, round {done}") if title else ways:
            results[way].append(ways[way]())
    return results


@contextmanager
def two_cores() -> Iterator[None]:
    """Let all that is started inside share as many cores as there are ranks."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:RANKS])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def call(
    words: Sequence[str],
    log: Path | None = None,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command with one thread a process, and return its output, which ``log`` keeps.

    Raises RuntimeError with the reason if it fails or takes longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = log or Path(folder, "log")
        status = process.run(words, file, {"OMP_NUM_THREADS": "1", **(environment or {})}, timeout)
        output = file.read_text(encoding="utf-8", errors="replace")
    place = f", see {log}" if log else ""
    if status is None:
        raise RuntimeError(f"not done after {timeout:.0f} s{place}")
    if status:
        raise RuntimeError(f"status {status}: {reason(output)}{place}")
    return output


def pretrain(flags: Sequence[str], ranks: int = RANKS) -> str:
    """Train with ``flags`` on CPU ranks, and return the log."""
    return call(command.training(flags, ranks, cpu=True))


def logged_seconds(log: str) -> list[float]:
    """Return the seconds of the steps of a training run, by its log."""
    return [float(ms) / 1e3 for ms in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", log)]


class Use(NamedTuple):
    """A process's output, its processor seconds (user and system), and its peak of memory in MiB."""

    output: str
    processor_seconds: float
    peak_mib: float


def use_of(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Use:
    """Run a command and measure it; its peak includes the memory of this process, which it is forked from."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(words, stdout=output, env={**os.environ, **(environment or {})})
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise RuntimeError(f"{shlex.join(words)} ended with status {child.returncode}")
        output.seek(0)
        return Use(output.read(), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
