"""How far are estimated peaks of memory from those that Megatron-LM's functional tests print?

python -m benchmarks.planner.found_memory RUNS

RUNS is the folder of ``found_runs``, with ``functional_tests.json`` beside it: the flags of Megatron-LM's
functional tests, and the peak that the last rank logs (``mem-max-allocated-bytes``, what PyTorch's allocator
gave out at most, so that driver, communicators and the allocator's unused blocks are not in it).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report import Row, table
from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
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


@dataclass(frozen=True, slots=True)
class Peak:
    """The ``measured`` peak of a job's last rank in bytes, and the estimate, or why there is none."""

    name: str
    gpus: int
    measured: float
    estimated: RankMemory | None
    why: str = ""

    @property
    def bytes(self) -> float:
        """The estimated bytes that PyTorch's allocator gives out: what is reserved is outside of it."""
        assert self.estimated is not None
        return self.estimated.total - self.estimated.reserved

    @property
    def ratio(self) -> float:
        """The estimated bytes for each one measured."""
        return self.bytes / self.measured


def words(arguments: Mapping[str, Any]) -> Sequence[str]:
    """Return the flags of a test, whose values are YAML's."""
    found = []
    for name, value in arguments.items():
        found.append(name)
        if value is not True:
            text = str(value)
            found += text.strip("[]").split() if text.startswith("[") and "*" not in text else [text]
    return found


def functional_tests(folder: Path) -> Iterator[Peak]:
    """Yield the peaks of the functional tests."""
    for row in json.loads((folder / "functional_tests.json").read_text(encoding="utf-8")):
        yield _estimated(row)


def _estimated(row: Mapping[str, Any]) -> Peak:
    name, measured = f"{row['case']}, {row['env']}, {row['gpu']}", row["max_allocated"]
    try:
        given = words(row["args"])
        sizes = {} if "--vocab-size" in given else {"vocab_size": _vocabulary(row["args"])}
        job = read(given, None, sizes, has_other_flags=True).counted()
        machine = system.read(_SYSTEMS.get(row["gpu"], row["gpu"]))
        found = []
        for gpus in _worlds(row):
            try:
                estimate = estimate_request(job.job, machine, for_world(job, gpus))
            except ValueError as error:
                why = error
                continue
            last = estimate.ranks[-1]
            state = last.weights + last.gradients + last.optimizer
            found.append((abs(state - row["allocated"]), gpus, last))
        if not found:
            raise why
    except (ValueError, SystemExit) as error:
        return Peak(name, 0, measured, None, str(error))
    _, gpus, last = min(found, key=lambda one: one[0])
    return Peak(name, gpus, measured, last)


def _worlds(row: Mapping[str, Any]) -> Sequence[int]:
    """Return the GPUs that a test may have had.

    Those of release tests are not published.  They are the power of two with which weights, gradients and
    optimizer state come next to what was allocated between steps.
    """
    if row["nodes"]:
        return [row["nodes"] * row["gpus_per_node"]]
    return [8] if row["test_type"] != "release" else [16, 32, 64, 128, 256, 512]


def _vocabulary(arguments: Mapping[str, Any]) -> int | None:
    files = f"{arguments.get('--tokenizer-model', '')} {arguments.get('--vocab-file', '')}"
    return next((size for end, size in _VOCABULARIES.items() if end in files), None)


def main(
    folder: Annotated[Path, typer.Argument(help="The folder of found_runs.")],
    least: Annotated[float, typer.Option(help="Leave out peaks of fewer GB.")] = 0.0,
) -> None:
    """Print each estimate beside its measurement, in parts."""
    every = [one for one in functional_tests(folder) if one.measured >= least * 1e9]
    known = sorted((one for one in every if one.estimated), key=lambda one: one.ratio)
    parts = [name for name, _ in known[0].estimated.components()]
    print(table(("job", "GPUs", "measured GB", "error", *parts), map(_row, known)))
    print(table(("not estimated", "why"), ((one.name, one.why) for one in every if not one.estimated)))


def _row(one: Peak) -> Row:
    parts = (f"{value / 1e9:.2f}" for _, value in one.estimated.components())
    return one.name, one.gpus, f"{one.measured / 1e9:.2f}", f"{one.ratio - 1:+.1%}", *parts


if __name__ == "__main__":
    typer.run(main)
