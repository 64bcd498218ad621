"""The planner on published steps that took no part in any fit when they were collected.

python -m benchmarks.planner.found_runs RUNS

RUNS is a folder with ``bridge.json``, the steps of Megatron-Bridge's performance summaries, and ``others.json``,
those of other publishers (NeMo, MLPerf, dgxc-benchmarking, Megatron-MoE-ModelZoo).  A row has ``gpu``, ``gpus``,
the seconds of a step (``step_s`` or ``seconds``), Megatron's ``flags``, and the name of a model if the flags do
not describe it.  The tables themselves are no part of this project.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from benchmarks.report import Row, table
from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.planner.described import read
from megatron_pp_ext.planner.step.estimate import estimate_request

SMALL_HIDDEN = 2048
_SYSTEMS = {"a100": "a100-80g"}
_BLACKWELL = ("b200", "b300", "gb200", "gb300")


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A published step: ``publisher`` printed the ``seconds`` that it took on so many ``gpus``."""

    publisher: str
    name: str
    gpu: str
    gpus: int
    precision: str
    seconds: float
    model: str | None
    flags: Sequence[str]
    why_outside: str

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return any(word in ("--num-experts", "--expert-model-parallel-size") for word in self.flags)

    @property
    def kind(self) -> str:
        """The kind of job whose error is reported."""
        if self.has_experts:
            return f"experts {'Blackwell' if self.gpu in _BLACKWELL else self.gpu.upper()}"
        if self.gpu in ("gb200", "gb300", "b300"):
            return f"dense {self.gpu.upper()}"
        return f"{'dense' if self.precision == 'bf16' else 'FP8'} {self.gpu.upper()}"


@dataclass(frozen=True, slots=True)
class Compared:
    """A run, and the seconds that the planner estimates, or why it does not."""

    run: FoundRun
    estimated: float | None
    why: str = ""

    @property
    def ratio(self) -> float:
        """The estimated seconds for each one measured."""
        assert self.estimated is not None
        return self.estimated / self.run.seconds


def found(folder: Path) -> Iterator[FoundRun]:
    """Yield the runs of ``folder``."""
    for row in json.loads((folder / "bridge.json").read_text(encoding="utf-8")):
        yield FoundRun(
            "Megatron-Bridge",
            " ".join(str(row[name]) for name in ("index", "model", "task")),
            row["gpu"],
            row["gpus"],
            row["precision"],
            row["step_s"],
            row.get("mpp_model"),
            row.get("flags", ()),
            _why_outside(row),
        )
    for row in json.loads((folder / "others.json").read_text(encoding="utf-8")):
        yield FoundRun(
            " ".join(str(row["source"]).split()[:2]),
            row["name"],
            row["gpu"],
            row["gpus"],
            row["precision"],
            row["seconds"],
            row["model"],
            row["flags"],
            "",
        )


_COMPLETED = {
    "full_iteration": ("--no-check-for-nan-in-loss-and-grad",),
    "Llama 4": ("--moe-router-pre-softmax",),
}
"""Flags without which Megatron would refuse a row's, and which its recipe has."""


def _why_outside(row: Mapping[str, Any]) -> str:
    """Return why the flags of a row of Megatron-Bridge do not describe it, if they do not."""
    if "LoRA" in row["task"]:
        return "adapters are trained, and not the weights"
    return "" if row.get("flags") else str(row.get("why") or "no recipe")


def asked(run: FoundRun) -> RequestedJob:
    """Return what ``run`` asks for; ValueError where the planner does not know it."""
    words = [*run.flags]
    for word, more in _COMPLETED.items():
        if word in run.flags or word in (run.model or "") or word in run.name:
            words += more
    job = read(words, run.model).counted()
    return job.changed(micro_batch_size=job.batch.micro_batch_size or 1)


def compared(run: FoundRun, machine: System | None = None) -> Compared:
    """Estimate ``run``, on ``machine`` in the place of the shipped system if one is given."""
    if run.why_outside:
        return Compared(run, None, run.why_outside)
    try:
        machine = machine or system.read(_SYSTEMS.get(run.gpu, run.gpu))
        job = asked(run)
        estimate = estimate_request(job.job, machine, for_world(job, run.gpus))
    except ValueError as error:
        return Compared(run, None, str(error))
    return Compared(run, estimate.step_seconds)


def by_kind(every: Iterable[Compared]) -> Mapping[str, Sequence[Compared]]:
    """Return the estimated runs of each kind, in the order of the kinds' names."""
    kinds = defaultdict(list)
    for one in every:
        if one.estimated is not None:
            kinds[one.run.kind].append(one)
    return dict(sorted(kinds.items()))


def errors(every: Sequence[Compared]) -> tuple[str, str]:
    """Return the mean of the absolute errors, and the mean error, in words."""
    return (
        f"{mean(abs(one.ratio - 1) for one in every):.1%}",
        f"{mean(one.ratio - 1 for one in every):+.1%}",
    )


def main(
    runs: Annotated[Path, typer.Argument(help="The folder with bridge.json and others.json.")],
    each: Annotated[bool, typer.Option("--each", help="Print every run too.")] = False,
) -> None:
    """Print the errors of each kind, and why rows cannot be asked."""
    every = [compared(run) for run in found(runs)]
    known = [one for one in every if one.estimated is not None]
    print(f"{len(known)} of {len(every)} rows can be asked\n")
    rows: list[Row] = [(kind, len(ones), *errors(ones)) for kind, ones in by_kind(every).items()]
    print(table(("kind", "runs", "mean absolute error", "mean error"), [*rows, ("all", len(known), *errors(known))]))
    refused = defaultdict(int)
    for one in every:
        if one.estimated is None:
            refused[one.why[:120]] += 1
    print(table(("not asked, since", "runs"), sorted(refused.items(), key=lambda pair: -pair[1])))
    if each:
        print(
            table(
                ("kind", "publisher", "run", "GPUs", "precision", "measured", "estimated", "error"),
                [
                    (one.run.kind, one.run.publisher, f"{one.run.name} {one.run.gpu}", one.run.gpus, one.run.precision,
                     f"{one.run.seconds:.3f}", f"{one.estimated:.3f}", f"{one.ratio - 1:+.1%}")
                    for one in sorted(known, key=lambda one: (one.run.kind, one.run.name))
                ],
            )
        )


if __name__ == "__main__":
    typer.run(main)
