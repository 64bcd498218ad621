"""Published steps that are no part of this project, with their estimates (see ``found_errors``).

A folder has ``bridge.json``, the steps of Megatron-Bridge's performance summaries, and ``others.json``,
those of other publishers (NeMo, MLPerf, dgxc-benchmarking, Megatron-MoE-ModelZoo).  A row has ``gpu``,
``gpus``, the seconds of a step (``step_s`` or ``seconds``), Megatron's ``flags``, and the name of a model if
the flags do not describe it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner.found_flags import flags_of, model_of
from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.planner.described import read
from megatron_pp_ext.planner.step.estimate import estimate_request

_PUBLISHERS = {
    "dgxc": "NVIDIA/dgxc-benchmarking",
    "bridge": "Megatron-Bridge",
    "nemo": "NeMo",
    "mlperf": "MLCommons",
    "mlcommons": "MLCommons",
    "modelzoo": "Megatron-MoE-ModelZoo",
    "bloom": "BigScience",
    "vtrain": "VIA Research",
}
"""The publishers of runs, by a word of their sources.  All of one publisher is left out together."""

_SYSTEMS = {"a100": "a100-80g"}
BLACKWELL = ("b200", "b300", "gb200", "gb300")


def publisher_of(source: str) -> str:
    """Return the publisher of ``source``; ValueError for an unknown one."""
    for word, publisher in _PUBLISHERS.items():
        if word in source.lower():
            return publisher
    raise ValueError(f"the source {source!r} is of no publisher that is known: name it in _PUBLISHERS")


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
    container: str = ""

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return any(word in ("--num-experts", "--expert-model-parallel-size") for word in self.flags)

    @property
    def kind(self) -> str:
        """The kind of job whose error is reported."""
        if self.has_experts:
            return f"experts, {'Blackwell' if self.gpu in BLACKWELL else self.gpu.upper()}"
        if self.gpu in ("gb200", "gb300", "b300"):
            return "dense, GB200, GB300 and B300"
        return f"{'dense' if self.precision == 'bf16' else 'FP8'}, {self.gpu.upper()}"

    @property
    def is_doubtful(self) -> bool:
        """Whether its flags are those of an older recipe, as for the last container of the summaries.

        They have no graphs of whole iterations, and steps are as short as those before, which had.
        """
        return "26.08" in self.container


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
            model_of(row),
            flags_of(row),
            _why_outside(row),
            row["container"],
        )
    for row in json.loads((folder / "others.json").read_text(encoding="utf-8")):
        yield FoundRun(
            publisher_of(" ".join(str(row["source"]).split()[:2])),
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


_CASTING_SLOWLY = ("25.11", "26.02")
"""The containers whose Transformer Engine casts the tokens of experts slowly (``Precision``)."""


def _why_outside(row: Mapping[str, Any]) -> str:
    """Return why the flags of a row of Megatron-Bridge do not describe it, if they do not."""
    if "LoRA" in row["task"]:
        return "adapters are trained, and not the weights"
    return ""


def machine_of(run: FoundRun) -> System:
    """Return the shipped system that ``run`` was on."""
    return system.read(_SYSTEMS.get(run.gpu, run.gpu))


def asked(run: FoundRun) -> RequestedJob:
    """Return the job of ``run``; ValueError where the planner does not know it."""
    words = [*run.flags]
    for word, more in _COMPLETED.items():
        if word in run.flags or word in (run.model or "") or word in run.name:
            words += more
    job = read(words, run.model).counted()
    return job.changed(
        micro_batch_size=job.batch.micro_batch_size or 1,
        casts_experts_slowly=run.container.partition(" ")[0] in _CASTING_SLOWLY,
    )


def compared(run: FoundRun, machine: System | None = None) -> Compared:
    """Estimate ``run``, on ``machine`` in the place of the shipped system if one is given."""
    if run.why_outside:
        return Compared(run, None, run.why_outside)
    try:
        machine = machine or machine_of(run)
        job = asked(run)
        estimate = estimate_request(job, machine, for_world(job, run.gpus))
    except ValueError as error:
        return Compared(run, None, str(error))
    return Compared(run, estimate.step_seconds)
