"""How far estimates of times and of memory were from published runs of a kind of job."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from megatron_pp_ext.costs.system import System
from megatron_pp_ext.job.pipeline import STOCK
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.entry import NO_PIPELINE

HOPPER, FP8_HOPPER, BLACKWELL, A100, EXPERTS_HOPPER, EXPERTS_BLACKWELL, SMALL = KINDS = (
    "dense on Hopper",
    "dense in FP8 on Hopper",
    "dense on Blackwell",
    "dense on A100",
    "experts on Hopper",
    "experts on Blackwell",
    "small models on one node",
)

_SMALL_HIDDEN = 2048
"""A host starts kernels more slowly than a GPU runs those of this hidden size or less."""


@dataclass(frozen=True, slots=True)
class Band:
    """Of the steps of a further publisher, 8 in 10 are expected at ``low`` to ``high`` times their estimate.

    That was so for published steps of ``kind`` where the range was made without their publisher; there are
    ``rows`` of ``publishers``, and ``error`` is the mean of their absolute relative errors.  A kind of few
    publishers has a wider range.  ``unmeasured`` are properties of a job that none of them had, in words.
    With one of them the range is the widest of all kinds; with more there is none, and ``low`` and ``high``
    are None.

    ``planner/validation.json`` has the figures of each kind, and what its runs were: their systems and
    schedules, the longest sequences and the most context-parallel ranks.
    ``python -m benchmarks.planner.error_ranges`` writes the file and says how a range is made.
    """

    kind: str
    low: float | None
    high: float | None
    error: float
    rows: int
    publishers: int
    unmeasured: tuple[str, ...] = ()

    def __str__(self) -> str:
        publishers = "one publisher" if self.publishers == 1 else f"{self.publishers} publishers"
        kind = f"this kind ({self.kind})"
        if not self.unmeasured:
            runs = f"made of {self.rows} published runs of {kind} by {publishers}, and of all others"
            return f"8 in 10 expected at {self.low:.2f} to {self.high:.2f} times the estimate: {runs}"
        without = f"none of {self.rows} published runs of {kind} was {', or '.join(self.unmeasured)}"
        if self.low is None or self.high is None:
            return f"no range of times to expect: {without}"
        widest = f"the widest range of all kinds is {self.low:.2f} to {self.high:.2f} times the estimate"
        return f"{without}; {widest}"

    def beyond(self, *unmeasured: str) -> "Band":
        """Return the band of a job that also has the ``unmeasured`` properties, in words."""
        return _band(self.kind, (*self.unmeasured, *unmeasured))

    def of(self, seconds: float) -> tuple[float, float] | None:
        """Return the range around an estimate of ``seconds``, if there is one."""
        return None if self.low is None or self.high is None else (self.low * seconds, self.high * seconds)


def kind_of(job: Job, system: System, gpus: int) -> str:
    """Return which of ``KINDS`` ``job`` on so many ``gpus`` is; others than these GPUs count as Hopper."""
    is_blackwell = system.multiplies_any_layout
    if job.model.num_experts:
        return EXPERTS_BLACKWELL if is_blackwell else EXPERTS_HOPPER
    if job.model.hidden_size <= _SMALL_HIDDEN and gpus <= system.gpus_per_node:
        return SMALL
    if is_blackwell:
        return BLACKWELL
    if job.precision.uses_fp8:
        return FP8_HOPPER
    return A100 if system.name.startswith("a100") else HOPPER


def band(work: Workload, schedule: str) -> Band:
    """Return the band of a step of ``work`` under ``schedule``."""
    kind = kind_of(work.job, work.system, work.gpus)
    return _band(kind, tuple(_unmeasured(work, schedule, validation()[kind])))


def _band(kind: str, unmeasured: tuple[str, ...]) -> Band:
    runs = validation()[kind]
    low, high = runs["low"], runs["high"]
    if unmeasured:
        kinds = validation().values()
        low, high = min(entry["low"] for entry in kinds), max(entry["high"] for entry in kinds)
    if len(unmeasured) > 1:
        low = high = None
    return Band(kind, low, high, runs["error"], runs["rows"], runs["publishers"], unmeasured)


def _unmeasured(work: Workload, schedule: str, runs: Mapping[str, Any]) -> Iterator[str]:
    """Yield what ``work`` has and none of the runs of its kind had, which are described by ``runs``.

    Megatron's own schedules count as one.
    """
    job, system = work.job, work.system.name
    length, context = job.model.seq_length, job.parallel.context_parallel_size
    if system not in runs["systems"]:
        yield f"on {system}"
    if schedule not in {*runs["schedules"], NO_PIPELINE, *STOCK}:
        yield f"under {schedule}"
    if length > runs["length"]:
        yield f"of sequences above {runs['length']:,} tokens"
    if context > runs["context"]:
        yield f"of more than {runs['context']} context-parallel ranks"
    if job.pipeline.pipeline_offload is not None or job.memory.cpu_offloading_num_layers:
        yield "with activations on the host"
    if work.placement.splits_head:
        yield "with a shared vocabulary"


@cache
def validation() -> Mapping[str, Mapping[str, Any]]:
    """Return the shipped figures of each kind."""
    file = resources.files("megatron_pp_ext.planner") / "validation.json"
    content: Mapping[str, Mapping[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return content


_ABOVE, _ABOVE_OF_EXPERTS = 0.03, 0.09
"""The parts by which peaks of whole models were above their estimates at most, of those from 10 GB on that
Megatron-LM's functional tests record (benchmarks.planner.found_memory).  Experts do not get as many tokens
each: the peak that is 9% above its estimate was 2% below it after two iterations."""

HEADROOM, HEADROOM_OF_EXPERTS = 0.06, 0.10
"""The share of a device's memory that a search leaves free by default: as much as peaks may be above their
estimates, and some for buffers that no model counts: 3%, and 1% where there are experts."""


def above(job: Job) -> float:
    """Return the part by which a peak may be above its estimate."""
    return _ABOVE_OF_EXPERTS if job.model.num_experts else _ABOVE


def headroom(job: Job) -> float:
    """Return the share of a device's memory that a search for ``job`` leaves free by default."""
    return HEADROOM_OF_EXPERTS if job.model.num_experts else HEADROOM
