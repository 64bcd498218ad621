"""Stock Megatron on the CPU: every layout of one model gives the same losses."""

import functools

import pytest
import torch

from tests.support import rounding
from tests.support.training import Run, global_parameters, train

EVALUATE = ["--eval-interval", "2", "--eval-iters", "1", "--global-batch-size", "4"]
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
TP2 = "--tensor-model-parallel-size 2"
INTERLEAVED = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
"""Each replica has a part of the gradients' sum."""


def gradients(chunks: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {name: parameter.main_grad.clone() for name, parameter in global_parameters(chunks)}


@functools.cache
def runs(ranks: int, flags: str = "") -> list[Run]:
    """Train once for all tests that look at the same layout."""
    return train(ranks, [*flags.split(), *EVALUATE], grab=gradients)


@pytest.mark.parametrize(
    ("ranks", "flags"), [(2, PP2), (4, PP4), (2, INTERLEAVED), (2, TP2), (4, f"{PP2} {SHARDED}")]
)
def test_numbers_are_those_of_one_rank(ranks: int, flags: str) -> None:
    (alone,) = runs(1)
    last = runs(ranks, flags)[-1]
    assert len(last.losses) == len(alone.losses) == 3
    assert last.losses[0] == pytest.approx(alone.losses[0], rel=rounding.relative(), abs=0)
    assert last.losses == pytest.approx(alone.losses, rel=rounding.of_losses(updates=2), abs=0)
    assert last.validation == pytest.approx(alone.validation, rel=rounding.of_losses(updates=3), abs=0)
    names = set()
    for rank, run in enumerate(runs(ranks, flags) if SHARDED not in flags else ()):
        names |= run.grabbed.keys()
        for name, gradient in run.grabbed.items():
            expected = part(alone.grabbed[name], gradient.shape, rank)
            rounding.assert_gradients_close(gradient, expected, name=name)
    assert names in (set(), alone.grabbed.keys())


def test_pipelines_agree_to_the_last_bit() -> None:
    """Where the model is cut changes no sum. One rank alone adds up the tied embedding in another order.

    The model learns: equal losses of one that does not would say little.
    """
    losses = runs(2, PP2)[-1].losses
    assert losses == runs(4, PP4)[-1].losses == runs(2, INTERLEAVED)[-1].losses
    assert losses[-1] < losses[0]


def part(whole: torch.Tensor, shape: torch.Size, index: int) -> torch.Tensor:
    """The part of a tensor that tensor-parallel rank ``index`` has, cut where ``shape`` is smaller."""
    for dimension, (size, cut) in enumerate(zip(whole.shape, shape, strict=True)):
        if size != cut:
            return whole.chunk(size // cut, dimension)[index]
    return whole


def test_gradients_carry_global_names() -> None:
    """On four stages each rank has two of the layers."""
    for rank, run in enumerate(runs(4, PP4)):
        layers = {name.split(".")[2] for name in run.grabbed if name.startswith("decoder.layers.")}
        assert layers == {str(2 * rank + 1), str(2 * rank + 2)}


def test_a_gated_model_with_grouped_queries_and_two_embeddings() -> None:
    """Its tensor-parallel parts are dealt out in other ways than those of the plain model."""
    flags = (
        "--swiglu --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --num-layers 2"
    )
    (alone,) = runs(1, flags)
    cut = runs(4, f"{flags} {PP2} {TP2}")[-1]
    assert cut.losses == pytest.approx(alone.losses, rel=rounding.of_losses(updates=2), abs=0)
