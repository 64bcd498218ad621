"""The peaks of memory that Megatron-LM's functional tests record, and their estimates (``found_memory``).

``functional_tests.json`` has the flags of each test (tests/functional_tests/test_cases, model_config.yaml at
commit d98e8a64d) and the memory in its golden values: the peak of the last rank, which alone logs it
(``mem-max-allocated-bytes``: what PyTorch's allocator gave out at most since the start), and what was
allocated between steps (``mem-allocated-bytes``).  Neither has the driver, communicators or blocks that are
not in use.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.planner.described import read
from megatron_pp_ext.planner.step.estimate import RankMemory, estimate_request

_SYSTEMS = {"a100": "a100-80g"}

_VOCABULARIES = {
    "nemotron_2_256k.model": 256000,
    "bpe/vocab.json": 50257,
    "tokenizer.model": 32000,
    "TOKENIZER_MODEL_PATH": 131072,
}
"""The sizes of the tokenizers' vocabularies, by the end of their files' names."""

_RECORDED_WITH = {
    ("deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release", "gb200"): {
        "--cross-entropy-fusion-impl": "te",
    },
}
"""Flags at the commit that recorded the peak, where those of d98e8a64d are others (f098fe848; 168cb15d7
changed the flag later)."""

_OTHER_JOBS = {
    ("gpt3_15b_8t_release_sm_gb200", "h100"): "recorded for gpt3_15b_8t_release and copied (22c69fa67)",
    ("gpt3_15b_8t_release_sm_gb200", "a100"): "the peak of gpt3_15b_8t_release to the byte (22c69fa67)",
    ("nemotron3_super_release_gb200", "gb200"): "recorded in NVFP4 with a file of precisions (9718f7d78)",
}
"""Tests whose peak was recorded for another job."""

_OLDER = "recorded with an older Transformer Engine, which attended unfused for --deterministic-mode"


@dataclass(frozen=True, slots=True)
class Peak:
    """The ``measured`` peak of a job's last rank in bytes, and the estimate, or ``why`` there is none."""

    name: str
    gpus: int
    measured: float
    estimated: RankMemory | None
    why: str = ""
    has_experts: bool = False

    @property
    def bytes(self) -> float:
        """The estimated bytes that PyTorch's allocator gives out: reserved memory is outside of it."""
        assert self.estimated is not None
        return self.estimated.total - self.estimated.reserved

    @property
    def error(self) -> float:
        """The estimate relative to the measurement, less 1."""
        return self.bytes / self.measured - 1


def functional_tests(folder: Path) -> Iterator[Peak]:
    """Yield the peaks of the tests in ``folder``."""
    for row in json.loads((folder / "functional_tests.json").read_text(encoding="utf-8")):
        yield _peak(row)


def _peak(row: Mapping[str, Any]) -> Peak:
    key = row["case"], row["gpu"]
    name, measured = f"{row['case']}, {row['env']}, {row['gpu']}", row["max_allocated"]
    arguments = {**row["args"], **_RECORDED_WITH.get(key, {})}
    if reason := _OTHER_JOBS.get(key) or (_OLDER if _is_older(row) else ""):
        return Peak(name, 0, measured, None, reason)
    try:
        words = _words(arguments)
        sizes = {} if "--vocab-size" in words else {"vocab_size": _vocabulary(arguments)}
        job = read(words, None, sizes, has_other_flags=True).counted()
        gpus, last = _placed(row, job)
    except (ValueError, SystemExit) as error:
        return Peak(name, 0, measured, None, str(error))
    return Peak(name, gpus, measured, last, has_experts=bool(job.model.num_experts))


def _is_older(row: Mapping[str, Any]) -> bool:
    arguments = row["args"]
    is_unnamed = "--deterministic-mode" in arguments and "--attention-backend" not in arguments
    return bool(row["cluster"]) or (row["env"] == "lts" and is_unnamed)


def _words(arguments: Mapping[str, Any]) -> Sequence[str]:
    """Return the flags of a test, whose values are YAML's."""
    words: list[str] = []
    for name, value in arguments.items():
        text = str(value)
        if "TOKENIZER" in text:
            continue
        words.append(name)
        if value is not True:
            many = text.startswith("[") and "*" not in text
            words += text.strip("[]").split() if many or name.endswith("-sizes") else [text]
    return words


def _vocabulary(arguments: Mapping[str, Any]) -> int | None:
    files = f"{arguments.get('--tokenizer-model', '')} {arguments.get('--vocab-file', '')}"
    return next((size for end, size in _VOCABULARIES.items() if end in files), None)


def _placed(row: Mapping[str, Any], job: RequestedJob) -> tuple[int, RankMemory]:
    """Return the GPUs of a test, and the estimated memory of its last rank.

    The GPUs of release tests are not published.  They are the fewest, by powers of two, with which a rank
    keeps no more between steps than was allocated then; ValueError where there is no such number.
    """
    machine = system.read(_SYSTEMS.get(row["gpu"], row["gpu"]))
    problem = ValueError("no number of GPUs is possible")
    for gpus in _worlds(row):
        try:
            last = estimate_request(job, machine, for_world(job, gpus)).ranks[-1]
        except ValueError as error:
            problem = error
            continue
        # The container for long-term support has no Transformer Engine with placeholders.
        resident = (
            last.weights + last.gradients + last.optimizer + (last.buffers if row["env"] == "dev" else 0.0)
        )
        if row["nodes"] or resident <= row["allocated"] or row["test_type"] != "release":
            return gpus, last
    raise problem


def _worlds(row: Mapping[str, Any]) -> Sequence[int]:
    if row["nodes"]:
        return [row["nodes"] * row["gpus_per_node"]]
    return [16, 32, 64, 128, 256, 512] if row["test_type"] == "release" else [8]
