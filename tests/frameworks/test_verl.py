"""verl's Megatron engine under our schedules: as without us, to the last bit."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support import frameworks, rounding

frameworks.require("verl")

from tests.frameworks import verl_engine  # noqa: E402


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in Hugging Face's format."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(verl_engine.LLAMA).to(torch.bfloat16).save_pretrained(folder)
    return folder


@cache
def stock(weights: Path) -> verl_engine.Run:
    return verl_engine.train(str(weights), None)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("v-half", [[1, 2], [7, 8]]), ("zb-h1", [[5, 6, 7, 8]]), ("interleaved", [[3, 4], [7, 8]])],
)
def test_same_bits_as_stock(name: str, layers: list[list[int]], weights: Path) -> None:
    """With as many microbatches in a step as no interleaved schedule of stock's would take."""
    ours, theirs = verl_engine.train(str(weights), name, chunks=len(layers)), stock(weights)
    assert ours.layers == layers
    counts = [len(losses) for losses in ours.losses[::2]]
    assert any(count % 2 for count in counts)
    # Three passes, then two updates.
    assert (ours.steps, theirs.steps) == ([count for count in counts for _ in range(5)], [])
    assert ours.losses == theirs.losses
    assert ours.norms == pytest.approx(theirs.norms, rel=rounding.relative())
    for mine, other in zip([*ours.passes, ours.weights], [*theirs.passes, theirs.weights], strict=True):
        assert mine.keys() == other.keys()
        assert not [name for name in other if not torch.equal(mine[name], other[name])]


def test_the_actor_learns_and_the_reference_stays(weights: Path) -> None:
    """What is compared above moves: before the first update both models are one, later they are not."""
    before, *later = [
        torch.equal(seen["old_log_probs: log_probs"], seen["ref_log_prob: log_probs"])
        for seen in stock(weights).passes
    ]
    assert before
    assert not any(later)
