"""How far estimates of a kind of job were from published runs of that kind.

``planner/validation.json`` has, for each kind, how many runs there were and between which factors of the
estimate eight in ten of the measured steps lie.  ``python -m benchmarks.planner.training_runs --keep`` writes
it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from megatron_pp_ext.costs.system import System
from megatron_pp_ext.job.typed_job import Job

DENSE, FP8, EXPERTS, SMALL, A100 = (
    "dense",
    "dense in FP8",
    "experts",
    "small models on one node",
    "dense on A100",
)
KINDS = (DENSE, FP8, A100, EXPERTS, SMALL)

_VALIDATED = ("h100", "a100-80g", "b200")
_SMALL_HIDDEN = 2048
"""A host starts kernels more slowly than a GPU runs those of this hidden size or less."""


@dataclass(frozen=True, slots=True)
class Band:
    """Eight in ten of ``rows`` published steps of a ``kind`` took ``low`` to ``high`` times the estimate.

    ``error`` is the mean of the absolute relative errors.  ``is_like`` says that the kind has no runs on this
    system, and the band is that of others.
    """

    kind: str
    low: float
    high: float
    error: float
    rows: int
    is_like: bool = False

    def __str__(self) -> str:
        runs = f"{self.rows} published runs of this kind ({self.kind})"
        other = ", none of them on this system" if self.is_like else ""
        return f"{runs} took {self.low:.2f} to {self.high:.2f} times their estimate{other}"

    def of(self, seconds: float) -> tuple[float, float]:
        """Return the band around an estimate of ``seconds``."""
        return self.low * seconds, self.high * seconds


def kind_of(job: Job, system: System, gpus: int) -> str:
    """Return which of ``KINDS`` ``job`` on so many ``gpus`` is."""
    if job.model.num_experts:
        return EXPERTS
    if job.model.hidden_size <= _SMALL_HIDDEN and gpus <= system.gpus_per_node:
        return SMALL
    if job.precision.uses_fp8:
        return FP8
    return A100 if system.name.startswith("a100") else DENSE


def band(job: Job, system: System, gpus: int) -> Band:
    """Return the band of ``job`` on so many ``gpus`` of ``system``."""
    kind = kind_of(job, system, gpus)
    return Band(kind, **validation()[kind], is_like=system.name not in _VALIDATED)


@cache
def validation() -> Mapping[str, Mapping[str, Any]]:
    """Return the shipped figures of each kind: those of ``Band`` but its name."""
    file = resources.files("megatron_pp_ext.planner") / "validation.json"
    content: Mapping[str, Mapping[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return content
