"""verl's Megatron engine under our schedules: as without us, to the last bit."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_pp_ext.megatron.step_numbers import BUBBLE, PEAK, PEAK_TO_PLAN
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
def stock(weights: Path, job: verl_engine.Job) -> list[verl_engine.Run]:
    return verl_engine.train(str(weights), None, job)


def assert_same_bits(ours: verl_engine.Run, theirs: verl_engine.Run) -> None:
    """Losses, what all passes returned, and weights as they are sent, to the last bit."""
    counts = [len(losses) for losses in ours.losses[::2]]
    assert any(count % 2 for count in counts)
    # Three passes, then two updates.
    assert (ours.steps, theirs.steps) == ([count for count in counts for _ in range(5)], [])
    assert ours.losses == theirs.losses
    assert ours.norms == pytest.approx(theirs.norms, rel=rounding.relative())
    mine, others = ([*run.passes, run.weights, run.adapters] for run in (ours, theirs))
    for one, other in zip(mine, others, strict=True):
        assert one.keys() == other.keys()
        assert not [name for name in other if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("v-half", [[1, 2], [7, 8]]),
        ("zb-h1", [[5, 6, 7, 8]]),
        ("interleaved", [[3, 4], [7, 8]]),
        ("flex", [[1, 2], [7, 8]]),
    ],
)
def test_same_bits_as_stock(name: str, layers: list[list[int]], weights: Path) -> None:
    """With as many microbatches in a step as no interleaved schedule of stock's would take."""
    (ours,) = verl_engine.train(str(weights), name, verl_engine.Job(chunks=len(layers)))
    assert ours.layers == layers
    assert_same_bits(ours, *stock(weights, verl_engine.Job()))


@pytest.mark.parametrize(("name", "chunks"), [("v-half", 2), ("zb-h1", 1)])
def test_replicas_with_other_numbers_of_microbatches(name: str, chunks: int, weights: Path) -> None:
    """Two data-parallel replicas of two pipeline ranks: each does the microbatches that its samples make."""
    job = verl_engine.Job(replicas=2)
    ours, theirs = verl_engine.train(str(weights), name, replace(job, chunks=chunks)), stock(weights, job)
    first, second = ([len(losses) for losses in run.losses] for run in ours)
    assert not [step for step in zip(first, second, strict=True) if len(set(step)) == 1]
    for one, other in zip(ours, theirs, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(("name", "chunks"), [("zb-h1", 1), ("v-half", 2)])
def test_microbatches_in_a_planned_order(name: str, chunks: int, weights: Path) -> None:
    """verl finds the losses where its own samples are; only the sums of gradients have another order."""
    (ours,) = verl_engine.train(str(weights), name, verl_engine.Job(chunks=chunks, order="rule"))
    (theirs,) = stock(weights, verl_engine.Job())
    assert ours.losses[:2] == theirs.losses[:2], "the first updates of the actor and of the critic"
    for one, other in zip(ours.losses, theirs.losses, strict=True):
        assert one == pytest.approx(other, rel=0.05, abs=0.05)
    assert all(torch.equal(ours.passes[0][kind], other) for kind, other in theirs.passes[0].items())


@pytest.mark.parametrize(("name", "chunks"), [("v-half", 2), ("interleaved", 2)])
def test_adapters(name: str, chunks: int, weights: Path) -> None:
    """The actor trains adapters alone, is its own reference without them, and sends them by themselves."""
    job = verl_engine.Job(adapts=True)
    (ours,) = verl_engine.train(str(weights), name, replace(job, chunks=chunks))
    assert_same_bits(ours, *stock(weights, job))
    assert len(ours.adapters) == 2 * 7 * verl_engine.LLAMA.num_hidden_layers
    before = ours.passes[0]
    assert not torch.equal(before["old_log_probs: log_probs"], before["ref_log_prob: log_probs"])


def test_the_actor_learns_and_the_reference_stays(weights: Path) -> None:
    """What is compared above moves: before the first update both models are one, later they are not."""
    (run,) = stock(weights, verl_engine.Job())
    before, *later = [
        torch.equal(seen["old_log_probs: log_probs"], seen["ref_log_prob: log_probs"]) for seen in run.passes
    ]
    assert before
    assert not any(later)


def test_numbers_among_its_metrics(weights: Path) -> None:
    """Every update but the first of the process has them, as verl's loggers take numbers."""
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import append_to_dict

    job = verl_engine.Job(chunks=2, by_workers=True)
    (run,) = verl_engine.train(str(weights), "v-half", job)
    numbers = [
        {name: number for name, number in update.items() if name.startswith("pipeline/")}
        for update in run.metrics
    ]
    assert len(numbers) == 2 * len(verl_engine.SAMPLES)
    assert [set(update) for update in numbers] == [
        set(),
        *[{BUBBLE, PEAK, PEAK_TO_PLAN}] * (len(numbers) - 1),
    ]
    collected: dict[str, list[float]] = {}
    for update in numbers[1:]:
        append_to_dict(collected, update)
    assert 0 < reduce_metrics(collected)[BUBBLE] < 1
