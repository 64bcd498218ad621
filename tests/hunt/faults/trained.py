"""Runs that nobody hits: what the others are compared with, and what goes on from their checkpoints."""

import functools
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_pp_ext import cpu
from tests.hunt.faults import jobs
from tests.hunt.faults.cases import JOB, SAVES, SAVES_EVERY, Runner
from tests.hunt.faults.rank import Orders
from tests.support.ranks import CRASH
from tests.support.samples import samples_of
from tests.support.training import TINY

_kept = tempfile.TemporaryDirectory(prefix="faults-")


class BrokenRun(Exception):
    """A run that nobody hit failed."""


@dataclass(frozen=True)
class Trained:
    """What a run saw: the losses of steps and of evaluations, samples by step, calls by rank and moment."""

    losses: list[float]
    validation: list[float]
    samples: dict[int, list[str]]
    calls: list[dict[str, int]]

    def after(self, step: int) -> tuple[list[float], list[float]]:
        """Return the losses and those of evaluations that a run has that goes on after ``step``."""
        return self.losses[step:], self.validation[step // SAVES_EVERY :]


def flags_of(runner: Runner, save: str, folder: Path, every: int = SAVES_EVERY) -> list[str]:
    """Return all flags of a run that saves in ``folder``."""
    layers = 3 if runner.stages == 3 else 4  # a layer for each chunk, of which two ranks may have four
    sizes = f"--pipeline-model-parallel-size {runner.stages} --num-layers {layers}"
    saves = f"--save {folder} --save-interval {every} --ckpt-format torch_dist {SAVES[save]}"
    ours = " ".join((sizes, runner.flags, runner.batch, saves)).split()
    return cpu.with_cpu_flags([*TINY, "--mock-data", *JOB, *ours])


def train(runner: Runner, flags: Sequence[str]) -> Trained:
    """Train with all of ``flags``; raises BrokenRun with what the ranks said last."""
    with tempfile.TemporaryDirectory(prefix="samples-") as name:
        samples = Path(name)
        ended = jobs.run(runner.ranks, Orders(list(flags), samples))
        if not ended.results or ended.left:
            problem = f"{ended.statuses}, {ended.left} left: {last_words(ended.story)}"
            raise BrokenRun(f"a run that nobody hit failed, {problem}")
        return Trained(
            losses=max((result["losses"] for result in ended.results), key=len),
            validation=max((result["validation"] for result in ended.results), key=len),
            samples=all_samples(samples),
            calls=[result["calls"] for result in ended.results],
        )


def last_words(story: str) -> str:
    """Return where a rank crashed, or else the last line that tells an error, or else the last one."""
    lines = [line for line in story.splitlines() if line.strip()] or [""]
    if crashes := [at for at, line in enumerate(lines) if line.startswith(CRASH)]:
        return "\n".join(lines[crashes[0] : crashes[0] + 60])
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exit|Exception)\b", line)]
    return (errors or lines)[-1][:300]


def all_samples(folder: Path) -> dict[int, list[str]]:
    """Return the samples of each step that the ranks noted in ``folder``, in order of their tokens."""
    found: dict[int, list[str]] = {}
    for file in folder.iterdir():
        for step, samples in samples_of(file).items():
            found[step] = sorted(found.get(step, []) + samples)
    return found


@functools.cache
def whole(runner: Runner, save: str = "sync") -> Trained:
    """Return the run from beginning to end."""
    with tempfile.TemporaryDirectory(prefix="whole-") as folder:
        return train(runner, flags_of(runner, save, Path(folder)))


def stock_samples(runner: Runner) -> dict[int, list[str]]:
    """Return the samples that stock takes in each step of the same layout and batch."""
    return whole(replace(runner, flags="", flushes=True)).samples


def expected(runner: Runner, resumed_at: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Return losses, and those of evaluations, after a run was resumed at each of these steps in turn.

    A pipeline that flushes loses nothing of them. One that does not is refilled, so it is compared with a run
    that was resumed from whole checkpoints at the same steps.
    """
    if runner.flushes:
        return whole(runner).after(resumed_at[-1])
    run, _ = _resumed(runner, resumed_at)
    return run.losses, run.validation


@functools.cache
def _resumed(runner: Runner, at: tuple[int, ...]) -> tuple[Trained, Path]:
    """Train to the end, again from the checkpoint of that run at the first of these steps, and so on."""
    folder = Path(tempfile.mkdtemp(dir=_kept.name))
    load: list[str] = []
    if at[-1]:
        _, before = _resumed(runner, at[:-1] or (0,))
        load = ["--load", str(before), "--ckpt-step", str(at[-1])]
    return train(runner, [*flags_of(runner, "sync", folder, every=1), *load]), folder
