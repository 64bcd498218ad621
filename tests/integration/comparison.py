"""Training runs under stock's schedules and under ours, and what has to be equal between them."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import training
from megatron.core import mpu


class Result(NamedTuple):
    """Losses of every step and evaluation, and all gradients of the first step by global name."""

    losses: list[float]
    gradients: dict[tuple[str, int], torch.Tensor]
    validation: list[float]


def gradients_by_name(chunks: list[torch.nn.Module]) -> dict[tuple[str, int], torch.Tensor]:
    """The gradients of this rank: (global name, tensor-parallel rank) -> main_grad."""
    rank = mpu.get_tensor_model_parallel_rank()
    return {(name, rank): p.main_grad.clone() for name, p in training.global_parameters(chunks)}


def run(world_size: int, flags: Sequence[str], **options: Any) -> Result:
    """Train the tiny GPT and bring together what its ranks saw."""
    ranks = training.train(world_size, flags, grab=gradients_by_name, **options)
    gradients: dict[tuple[str, int], torch.Tensor] = {}
    for rank in ranks:
        for name, gradient in rank.grabbed.items():
            known = gradients.setdefault(name, gradient)
            # A tied weight, or a data-parallel replica: the copies must agree to the last bit.
            assert torch.equal(known, gradient), name
    last = next(rank for rank in reversed(ranks) if rank.losses)
    for rank in ranks:
        # Only the ranks of the last pipeline stage tell a loss, and they tell the same.
        assert rank.losses in ([], last.losses)
    return Result(last.losses, gradients, last.validation)


@cache
def stock(world_size: int, *flags: str) -> Result:
    """The same under stock's own schedule; kept, since many cases compare with it."""
    return run(world_size, flags)


def assert_same_bits(ours: Result, theirs: Result) -> None:
    """Losses of all steps and all gradients of the first, bit for bit."""
    assert ours.losses == theirs.losses
    assert ours.gradients.keys() == theirs.gradients.keys()
    different = [name for name, g in ours.gradients.items() if not torch.equal(g, theirs.gradients[name])]
    assert not different


def assert_same_gradients(ours: Result, theirs: Result) -> None:
    """All gradients of the first step bit for bit, later losses within 1e-6.

    Gradient clipping sums the norm rank by rank; another placement sums in another order, and where the
    norm is clipped, the last bits of the update follow.
    """
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert ours.losses[0] == theirs.losses[0]
    assert ours.gradients.keys() == theirs.gradients.keys()
    assert all(torch.equal(g, theirs.gradients[name]) for name, g in ours.gradients.items())
