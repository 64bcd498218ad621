"""Counts the bytes of weights, gradients and optimizer state that a rank holds of the model."""

from dataclasses import dataclass

from megatron_pp_ext.costs.optimizers import SIZES, Update, moment_bytes, update
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.job.typed_job import Job


@dataclass(frozen=True, slots=True)
class Sharing:
    """The numbers of ranks that share the optimizer's state of dense and of expert weights."""

    dense: int
    expert: int


@dataclass(frozen=True, slots=True)
class ModelState:
    """The bytes of a rank, and the update of its weights."""

    weights: float
    gradients: float
    optimizer: float
    update: Update


def _fp8_copies(job: Job) -> float:
    """Return the bytes of the FP8 or FP4 copies of a weight.

    Transformer Engine keeps two FP8 copies of a weight from a step's first microbatch on, one of which is
    transposed (module/linear.py, as Megatron 0.17 to 0.19 call it).  With --fp8-param-gather these two are
    all there is of the weight, as many bytes as it has in half precision.
    """
    return 0 if job.precision.keeps_operands else 2 * job.precision.operand_size


def model_state(job: Job, part: Part, sharing: Sharing) -> ModelState:
    """Return the state of a rank of ``job`` whose stages add up to ``part``."""
    total = part.parameters + part.expert_parameters
    dense, expert = (sharing.dense, sharing.expert) if job.memory.shards_state else (1, 1)
    updated = part.parameters / dense + part.expert_parameters / expert
    matrix_weights = part.matrices.parameters if part.matrices else 0.0
    matrices = matrix_weights / dense + part.expert_parameters / expert
    moments = moment_bytes(job.memory, matrices / updated if updated else 0.0)
    weights = job.precision.weight_size * total + _fp8_copies(job) * part.fp8_parameters
    share = updated / total if total else 0.0
    return ModelState(
        weights=weights * (share if job.memory.shards_weights else 1.0),
        gradients=job.precision.gradient_size * total * (share if job.memory.shards_gradients else 1.0),
        optimizer=(moments + _copies(job)) * updated * (1 - job.memory.offloaded),
        update=update(job, part, updated, moments, dense, expert),
    )


def _copies(job: Job) -> float:
    """Return the bytes of the fp32 copy of each weight in half precision, and of that of its gradient."""
    if not job.precision.is_half:
        return 0
    copy = SIZES.get(job.memory.main_params_dtype, 4)
    # Where state is not shared out, half-precision gradients are copied to fp32 for the update.
    return copy + (4 if job.precision.gradient_size == 2 and not job.memory.shards_state else 0)
