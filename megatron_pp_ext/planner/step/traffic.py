"""The exchanges of data-parallel ranks in a step, and the seconds of their updates."""

from dataclasses import dataclass

from megatron_pp_ext.costs.optimizers import update_seconds
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.state import Sharing, model_state
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.job.typed_job import Job


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds of a rank besides its actions: gradients are reduced, weights gathered, and weights updated."""

    reduction: float
    gathering: float
    update: float


def waits(job: Job, system: System, part: Part, sharing: Sharing) -> Waits:
    """Return the seconds that a rank whose stages add up to ``part`` waits in a step without overlap."""
    parallel, precision = job.parallel, job.precision
    groups = (
        (part.parameters, sharing.dense, parallel.tensor_model_parallel_size),
        (part.expert_parameters, sharing.expert, parallel.expert_ranks),
    )
    out = sum(system.gather_seconds(precision.gradient_size * size, *group) for size, *group in groups)
    # All weights of experts are operands.
    operands = (
        max(0.0, part.fp8_parameters - part.expert_parameters),
        min(part.fp8_parameters, part.expert_parameters),
    )
    less = precision.weight_size - precision.gathered_size
    back = sum(
        system.gather_seconds(precision.weight_size * size - less * operand, *group)
        for (size, *group), operand in zip(groups, operands, strict=True)
    )
    is_sharded = job.memory.shards_state
    state = model_state(job, part, sharing)
    return Waits(
        reduction=out if is_sharded else 2 * out,
        gathering=back if is_sharded else 0.0,
        update=update_seconds(job, system, state.update, state.gradients),
    )
