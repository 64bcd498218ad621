"""slime's training step under our schedules: as without us, to the last bit.  SLIME names its checkout."""

import os
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support import frameworks, rounding

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # slime compiles parts of its losses
frameworks.require_checkout("SLIME", "slime", "torch_memory_saver", "sglang", "sglang_router")
sys.path.append(str(Path(__file__).parents[2] / "examples"))

from tests.frameworks.slime_loop import Job, Run, train  # noqa: E402

COUNTS = [8, 8, 3, 3, 6, 6]
"""The microbatches of each pass for log-probabilities and of each step after it."""


@cache
def stock(is_recomputed: bool = False) -> Run:
    run = train(None, Job(is_recomputed=is_recomputed))
    assert all(norm > 0 for norm in run.norms)
    return run


def assert_same_bits(ours: Run, theirs: Run) -> None:
    """All to the last bit, but norms, whose sum goes by rank, within its rounding."""
    assert (ours.steps, theirs.steps) == (COUNTS, [])
    assert ours.losses == theirs.losses
    assert ours.norms == pytest.approx(theirs.norms, rel=rounding.relative())
    assert_same_log_probs(ours, theirs)
    assert ours.weights.keys() == theirs.weights.keys()
    assert [
        name for name, weight in theirs.weights.items() if not torch.equal(weight, ours.weights[name])
    ] == []


def assert_same_log_probs(ours: Run, theirs: Run, rollouts: int | None = None) -> None:
    for mine, other in zip(ours.log_probs[:rollouts], theirs.log_probs[:rollouts], strict=True):
        assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize(
    ("name", "layers"),
    [("v-half", [[1, 2], [7, 8]]), ("zb-h1", [[5, 6, 7, 8]]), ("interleaved", [[3, 4], [7, 8]])],
)
def test_same_bits_as_stock(name: str, layers: list[list[int]]) -> None:
    """Installed by slime's own hook, after its process groups; with an odd number of microbatches, too."""
    ours = train(name, Job(chunks=len(layers)))
    assert ours.layers == layers
    assert_same_bits(ours, stock())


def test_flex_with_full_recomputation() -> None:
    """What is compiled goes by a config that Megatron made of slime's arguments."""
    ours = train("flex", Job(chunks=2, is_recomputed=True), memory_limit=1.0)
    assert_same_bits(ours, stock(is_recomputed=True))


@pytest.mark.parametrize(("name", "chunks"), [("zb-h1", 1), ("v-half", 2)])
def test_the_example_orders_microbatches(name: str, chunks: int) -> None:
    """Each sample has its log-probabilities, and the first step the same losses, of other microbatches."""
    ours, theirs = train(name, Job(chunks=chunks, init="slime_hook.install")), stock()
    assert ours.steps == COUNTS
    assert_same_log_probs(ours, theirs, rollouts=1)
    first, other = ours.losses[0], theirs.losses[0]
    assert first != other and sorted(first) == sorted(other)
    assert ours.norms[0] == pytest.approx(theirs.norms[0], rel=1e-2)
