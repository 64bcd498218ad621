"""Counts the bytes of weights, gradients and optimizer state that a rank holds of the model."""

from dataclasses import dataclass

from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.job.typed_job import Job

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


def _fp8_copies(job: Job) -> int:
    """Return the bytes that a weight in FP8 takes beside those in the forward's precision.

    Transformer Engine keeps two FP8 copies of a weight from a step's first microbatch on, one of which is
    transposed (module/linear.py, as Megatron 0.17 to 0.19 call it).  With --fp8-param-gather these two are
    all there is of the weight, as many bytes as it has in half precision.
    """
    return 0 if job.precision.fp8_param_gather else 2 * _SIZES["fp8"]


def model_state(job: Job, part: Part, sharing: Sharing) -> ModelState:
    """Return the state of a rank of ``job`` whose stages add up to ``part``."""
    total = part.parameters + part.expert_parameters
    updated = total
    if job.memory.use_distributed_optimizer:
        updated = part.parameters / sharing.dense + part.expert_parameters / sharing.expert
    return ModelState(
        weights=job.precision.weight_size * total + _fp8_copies(job) * part.fp8_parameters,
        gradients=job.precision.gradient_size * total,
        optimizer=_optimizer_size(job) * updated,
        updated=updated,
    )


def _optimizer_size(job: Job) -> float:
    """Return the optimizer's bytes for each weight: its moments, and an fp32 copy of a half-precision one."""
    memory = job.memory
    if memory.optimizer == "sgd":
        moments = 4 if memory.sgd_momentum else 0
    else:
        moments = _SIZES.get(memory.exp_avg_dtype, 4) + _SIZES.get(memory.exp_avg_sq_dtype, 4)
    if not job.precision.is_half:
        return moments
    copy = _SIZES.get(memory.main_params_dtype, 4)
    # Without the distributed optimizer, half-precision gradients are copied to fp32 for the update.
    gradients = 4 if job.precision.gradient_size == 2 and not memory.use_distributed_optimizer else 0
    return moments + copy + gradients
