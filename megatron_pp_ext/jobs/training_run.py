"""Short training runs that a command starts to measure something: their flags and their launch."""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def words_of(flags: Iterable[str]) -> list[str]:
    """``flags`` with ``--name=value`` as two words."""
    return [word for flag in flags for word in flag.split("=", 1)]


def whole_number(words: Sequence[str], name: str, default: int = 1) -> int:
    """The number behind flag ``name``, the last of several, ``default`` where it is not given."""
    if name not in words:
        return default
    at = len(words) - 1 - words[::-1].index(name)
    try:
        return int(words[at + 1])
    except (IndexError, ValueError):
        raise ValueError(f"{name} needs a whole number behind it: correct the model's flags") from None


def short_run(flags: Sequence[str], steps: int, changed: Mapping[str, Any]) -> list[str]:
    """``flags`` for a run of ``steps`` steps without evaluation, with those of ``changed`` in their place.

    Of a flag that comes twice, Megatron takes the last.  Data is made up if the flags name none.
    """
    words = words_of(flags)
    data = [] if {"--data-path", "--mock-data"} & set(words) else ["--mock-data"]
    is_long = "--train-samples" in words or whole_number(words, "--train-iters", 0) >= steps
    length = [] if is_long else ["--train-iters", str(steps)]
    changed = {**changed, "--exit-interval": steps, "--eval-iters": 0, "--eval-interval": 1000}
    return [*flags, *data, *length, *(str(word) for change in changed.items() for word in change)]


_FILES = ("--save", "--load", "--tensorboard-dir", "--pipeline-trace", "--profile-pipeline")
"""Of the real run, which a short one is to leave alone."""


def without_files(flags: Iterable[str]) -> Iterator[str]:
    """``flags`` without those that name files of the real run."""
    following = iter(flags)
    for flag in following:
        name, equals, _ = flag.partition("=")
        if name not in _FILES:
            yield flag
        elif not equals:
            next(following, None)


def command(launcher: Sequence[str], script: Path | None, flags: Sequence[str]) -> list[str]:
    """What runs ``script``, or this package's pretrain_gpt, with ``flags``: on the CPU if there is no GPU."""
    import torch

    on_cpu = [] if torch.cuda.is_available() else ["--cpu"]
    module = ["megatron_pp_ext.pretrain_gpt"] if script is None else ["megatron_pp_ext"]
    named = [] if script is None else [str(script)]
    return [sys.executable, *launcher, "-m", *module, *on_cpu, *named, *flags]


def last_words(output: str) -> str:
    """The line of a failed run's output that most likely says why."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("megatron_pp_ext: ") or ": error: " in line]
    return (ours or lines or ["it said nothing"])[-1]


def run_all(commands: Mapping[int, tuple[list[str], Mapping[str, str]]], logs: Mapping[int, Path]) -> None:
    """Run commands, each with its environment, at the same time; ValueError once one has failed.

    What each says goes to its log.
    """
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for key, (words, environment) in commands.items():
            with logs[key].open("wb") as log:
                running[key] = subprocess.Popen(words, stdout=log, stderr=log, env=dict(environment))
        for key, process in running.items():
            if process.wait():
                said = last_words(logs[key].read_text(encoding="utf-8", errors="replace"))
                raise ValueError(f"the run of rank {key} ended with status {process.returncode}: {said}")
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.wait()
