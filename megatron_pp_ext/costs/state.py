"""Counts the bytes of weights, gradients and optimizer state that a rank holds of the model."""

import math
from argparse import Namespace
from dataclasses import dataclass

from megatron_pp_ext.costs.part import Part

_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Sharing:
    """The numbers of ranks that share the optimizer's state of dense and of expert weights."""

    dense: int
    expert: int


@dataclass(frozen=True, slots=True)
class ModelState:
    """The bytes of a rank, and the number of weights that its optimizer updates."""

    weights: float
    gradients: float
    optimizer: float
    updated: float


def gradient_size(args: Namespace) -> int:
    """Return the bytes of a gradient in Megatron's buffers: fp32, unless flags or fp16's default differ."""
    if args.bf16:
        return 2 if args.grad_reduce_in_bf16 else 4
    if args.fp16:
        return 4 if args.accumulate_allreduce_grads_in_fp32 else 2
    return 4


def weight_size(args: Namespace) -> int:
    """Return the bytes of a weight, and of a number in an activation, as the forward uses it."""
    return 2 if args.bf16 or args.fp16 else 4


def uses_fp8(args: Namespace) -> bool:
    """Whether the products of the layers are computed in FP8."""
    return bool(args.fp8) and args.transformer_impl != "local"


def _fp8_copies(args: Namespace) -> int:
    """Return the bytes that a weight in FP8 takes beside those in the forward's precision.

    Transformer Engine keeps two FP8 copies of a weight from a step's first microbatch on, one of which is
    transposed (module/linear.py, as Megatron 0.17 to 0.19 call it).  With --fp8-param-gather these two are
    all there is of the weight, as many bytes as it has in half precision.
    """
    return 0 if args.fp8_param_gather else 2 * _SIZES["fp8"]


def model_state(args: Namespace, part: Part, sharing: Sharing) -> ModelState:
    """Return the state of a rank whose stages add up to ``part``."""
    total = part.parameters + part.expert_parameters
    updated = total
    if args.use_distributed_optimizer:
        updated = part.parameters / sharing.dense + part.expert_parameters / sharing.expert
    return ModelState(
        weights=weight_size(args) * total + _fp8_copies(args) * part.fp8_parameters,
        gradients=gradient_size(args) * total,
        optimizer=_optimizer_size(args) * updated,
        updated=updated,
    )


def padded_vocabulary(args: Namespace) -> int:
    """Return the rows of the embedding, padded as Megatron does for tensor-parallel ranks to share them."""
    if args.padded_vocab_size:
        return int(args.padded_vocab_size)
    if not getattr(args, "pad_vocab_size", True):
        return int(args.vocab_size)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return math.ceil(args.vocab_size / multiple) * multiple


def _optimizer_size(args: Namespace) -> float:
    """Return the optimizer's bytes for each weight: its moments, and an fp32 copy of a half-precision one."""
    if args.optimizer == "sgd":
        moments = 4 if args.sgd_momentum else 0
    else:
        moments = _SIZES.get(str(args.exp_avg_dtype), 4) + _SIZES.get(str(args.exp_avg_sq_dtype), 4)
    if weight_size(args) == 4:
        return moments
    copy = _SIZES.get(str(args.main_params_dtype), 4)
    # Without the distributed optimizer, half-precision gradients are copied to fp32 for the update.
    gradients = 4 if gradient_size(args) == 2 and not args.use_distributed_optimizer else 0
    return moments + copy + gradients
