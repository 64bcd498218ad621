"""Training runs under stock's schedules and under ours, and the comparisons of their numbers."""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_pp_ext.schedule.formats import trace_file
from megatron_pp_ext.schedule.recorded import RecordedStep
from tests.support import rounding, training

MAIN_FAMILIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "v-min", "v-half", "v-zb")
"""The schedules that are trained in every layout; the others differ from them in their order alone."""

TWICE_USED = {"embedding.word_embeddings.weight"}
"""Multi-token prediction embeds its tokens too. Where the output layer or the first stage has that weight,
stock sums all gradients of a microbatch first; elsewhere they are added apart."""


OWN_STEPS = {"--train-iters", "--train-samples", "--eval-interval"}


class Result(NamedTuple):
    """Losses of every step and evaluation, and all gradients of the first step by global name.

    ``norms`` are those of every step's gradients, before clipping; None where the step was skipped.
    ``logged`` are the losses, auxiliary ones included, that Megatron prints after a step.
    ``clips_above`` is the norm from which on Megatron clips.
    """

    losses: list[float]
    gradients: dict[tuple[str, int], torch.Tensor]
    validation: list[float]
    norms: list[float | None]
    logged: list[dict[str, str]]
    clips_above: float


class Rows(NamedTuple):
    """The place of a gradient's rows in a vocabulary that all pipeline ranks share."""

    first: int
    total: int
    tensor_ranks: int


def gradients_by_name(chunks: list[torch.nn.Module]) -> dict[tuple[str, int | Rows], torch.Tensor]:
    """The gradients of this rank: (global name, tensor-parallel rank or rows) -> main_grad."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.ddp_config.use_distributed_optimizer:
                _gather(group)
    rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    gradients: dict[tuple[str, int | Rows], torch.Tensor] = {}
    for name, parameter in training.global_parameters(chunks):
        rows = getattr(parameter, "rows_of_whole", None)
        if not parameter.requires_grad:
            assert parameter.grad is None and not hasattr(parameter, "main_grad"), name
            continue
        gradients[name, Rows(*rows, size) if rows else rank] = parameter.main_grad.clone()
    return gradients


def _joined(gradients: dict[tuple[str, int | Rows], torch.Tensor]) -> dict[tuple[str, int], torch.Tensor]:
    """Put the rows of a shared vocabulary together, as tensor-parallel ranks have them without sharing."""
    whole: dict[tuple[str, int], torch.Tensor] = {}
    parts: dict[str, dict[Rows, torch.Tensor]] = {}
    for (name, place), gradient in gradients.items():
        if isinstance(place, Rows):
            parts.setdefault(name, {})[place] = gradient
        else:
            whole[name, place] = gradient
    for name, rows in parts.items():
        table = torch.cat([rows[place] for place in sorted(rows)])
        place = next(iter(rows))
        assert len(table) == place.total, name
        whole |= {(name, rank): part for rank, part in enumerate(table.chunk(place.tensor_ranks))}
    return whole


def _gather(group: Any) -> None:
    """Make gradients whole of which a distributed optimizer has reduced only this rank's part."""
    replicas = group.intra_distributed_optimizer_instance_group
    for bucket in group.buckets:
        part = bucket.grad_data.chunk(replicas.size())[replicas.rank()]
        dist.all_gather_into_tensor(bucket.grad_data, part.clone(), group=replicas)


def run(world_size: int, flags: Sequence[str], **options: Any) -> Result:
    """Train the tiny GPT and bring together the results of its ranks.

    Two steps show all gradients and what an update makes of them.  There are more where ``flags`` say so, and
    three where an evaluation may stand between them.
    """
    steps = () if OWN_STEPS.intersection(flags) else ("--train-iters", "2")
    ranks = training.train(world_size, [*steps, *flags], grab=gradients_by_name, **options)
    gradients: dict[tuple[str, int | Rows], torch.Tensor] = {}
    for rank in ranks:
        for name, gradient in rank.grabbed.items():
            first = gradients.setdefault(name, gradient)
            # A tied weight, or a data-parallel replica: the copies must agree to the last bit.
            assert are_same(first, gradient), name
    last = next(rank for rank in reversed(ranks) if rank.losses)
    for rank in ranks:
        # Only the ranks of the last pipeline stage tell a loss, and they tell the same.
        assert rank.losses in ([], last.losses)
        assert rank.grad_norms == last.grad_norms
    return Result(
        last.losses, _joined(gradients), last.validation, last.grad_norms, last.logged, _clips_above(flags)
    )


def traced(world_size: int, flags: Sequence[str], **options: Any) -> RecordedStep:
    """Train the tiny GPT for two steps, or as many as ``flags`` say, and return the trace of the last."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        words = ["--train-iters", "2", *flags, "--pipeline-trace", str(file)]
        training.train(world_size, words, **options)
        return trace_file.read(file)


def are_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors agree to the last bit; where fp16 overflowed, both have no number."""
    return tensor.shape == other.shape and torch.allclose(tensor, other, rtol=0, atol=0, equal_nan=True)


def _clips_above(flags: Sequence[str]) -> float:
    """Megatron clips at 1 by default, and at 0 never."""
    bound = flags[flags.index("--clip-grad") + 1] if "--clip-grad" in flags else 1
    return float(bound) or math.inf


@cache
def stock(world_size: int, *flags: str) -> Result:
    """The same under stock's own schedule; kept, since many cases compare with it."""
    return run(world_size, flags)


def assert_same_bits(ours: Result, theirs: Result) -> None:
    """Losses of all steps and all gradients of the first, bit for bit; norms as another order sums them.

    No update before the last loss may be clipped, since the norm's last bits would be in the weights.
    """
    clipped = [norm for norm in theirs.norms[:-1] if norm is not None and norm > theirs.clips_above]
    assert not clipped, "a clipped update is not equal to the last bit; give --clip-grad 0"
    assert ours.losses == theirs.losses
    assert_same_norms(ours.norms, theirs.norms)
    assert [
        name
        for name, gradient, expected in both_gradients(ours, theirs)
        if not torch.equal(gradient, expected)
    ] == []


def both_gradients(
    ours: Result, theirs: Result
) -> Iterator[tuple[tuple[str, int], torch.Tensor, torch.Tensor]]:
    """Yield all gradients of the first step: (name, rank), ours and theirs; both runs must have the same."""
    assert ours.gradients.keys() == theirs.gradients.keys()
    yield from ((name, gradient, theirs.gradients[name]) for name, gradient in ours.gradients.items())


def assert_same_norms(
    ours: Sequence[float | None], theirs: Sequence[float | None], within: float = rounding.relative()
) -> None:
    """The same steps skipped, and the norms of the others; by default as another order sums them."""
    assert [norm is None for norm in ours] == [norm is None for norm in theirs]
    norms_of_both = [[norm for norm in norms if norm is not None] for norms in (ours, theirs)]
    assert norms_of_both[0] == pytest.approx(norms_of_both[1], rel=within)


def assert_same_gradients(ours: Result, theirs: Result, later: float = rounding.relative()) -> None:
    """All gradients of the first step bit for bit, losses of later steps within ``later``.

    Norms are within four times that: an update moves them by a third, and a loss by a fortieth.

    Gradient clipping sums the norm rank by rank; another placement sums in another order, and where the
    norm is clipped, the last bits of the update follow: all numbers of a gradient are scaled alike, and none
    changes its sign.
    """
    assert ours.losses == pytest.approx(theirs.losses, rel=later)
    assert ours.losses[0] == theirs.losses[0]
    assert_same_norms(ours.norms, theirs.norms, within=4 * later)
    assert_same_norms(ours.norms[:1], theirs.norms[:1])
    assert all(torch.equal(gradient, expected) for _, gradient, expected in both_gradients(ours, theirs))


def assert_same_predictions(ours: Result, theirs: Result) -> None:
    """The same numbers of a model with multi-token prediction, as far as ``TWICE_USED`` weights allow.

    Losses of all steps, and of their evaluations if there are any, are within their rounding.
    """
    steps = len(theirs.losses)
    assert "mtp_1 loss" in ours.logged[0]
    assert ours.losses == pytest.approx(theirs.losses, rel=rounding.of_losses(updates=steps - 1))
    assert ours.validation == pytest.approx(theirs.validation, rel=rounding.of_losses(updates=steps))
    for (name, _), gradient, expected in both_gradients(ours, theirs):
        if name in TWICE_USED:
            rounding.assert_gradients_close(gradient, expected, name=name)
        else:
            assert torch.equal(gradient, expected), name


def assert_close(ours: Result, theirs: Result) -> None:
    """The same numbers in fp32, up to sums taken in another order, of all steps and their evaluations.

    The gradients of the first step are, together, within 1e-6 of their norm, and each tensor's are within the
    rounding of its largest.
    """
    steps = len(theirs.losses)
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=rounding.relative())
    assert ours.losses == pytest.approx(theirs.losses, rel=rounding.of_losses(updates=steps - 1))
    assert ours.validation == pytest.approx(theirs.validation, rel=rounding.of_losses(updates=steps))
    assert_same_norms(ours.norms[:1], theirs.norms[:1])
    assert_same_norms(ours.norms, theirs.norms, within=4 * rounding.of_losses(updates=steps))
    for name, gradient, expected in both_gradients(ours, theirs):
        rounding.assert_gradients_close(gradient, expected, name=str(name))
    assert distance(ours, theirs) < 1e-6


def distance(ours: Result, theirs: Result) -> float:
    """The norm of the difference of all gradients of the first step, by that of ``theirs``."""
    pairs = [(gradient, expected) for _, gradient, expected in both_gradients(ours, theirs)]
    difference = math.hypot(*((gradient - expected).double().norm().item() for gradient, expected in pairs))
    return difference / math.hypot(*(expected.double().norm().item() for _, expected in pairs))
