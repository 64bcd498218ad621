"""The costs of a model's stages, from the arithmetic of its layers or from what a machine takes for it."""

from collections.abc import Callable
from functools import partial

from megatron_pp_ext.costs import stage_parts
from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.costs.system_fields import Link
from megatron_pp_ext.costs.system_kernels import SystemKernelSeconds
from megatron_pp_ext.job import layers
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.placement import Placement


def cost_model[J: Job](job: J, estimate: Callable[[J, Placement], Costs]) -> CostModel:
    """Return the model by which stages of ``job`` cost what ``estimate`` returns, at other lengths too."""

    def at(tokens: int, sequences: int) -> CostModel:
        return cost_model(job.changed(seq_length=tokens, micro_batch_size=sequences), estimate)

    return CostModel(partial(estimate, job), at)


def stage_costs(job: Job, placement: Placement, rows: int) -> Costs:
    """Return the costs of the stages of ``placement``, cut as Megatron will cut them; hops are free.

    Seconds are proportional to floating-point operations, activations and messages are counted in bytes.
    The embedding has ``rows`` rows.

    ValueError where ``job`` does not determine them.
    """
    model, splits_head = model_parts(job, vocabulary=rows), placement.splits_head
    parts = stage_parts.stage_parts(job, model, layers.by_stage(job, placement.stages), splits_head)
    shared = stage_parts.head_costs(job, model) if splits_head else None
    return Costs(tuple(part.costs() for part in parts), message=message_bytes(job), head=shared)


def stage_seconds(job: Job, stages: int, rows: int, system: System, data: int) -> Costs:
    """Return the same in the seconds of ``system``, messages included, on ``data`` data-parallel ranks."""
    model = model_parts(job, SystemKernelSeconds(system, job), vocabulary=rows)
    parts = stage_parts.stage_parts(job, model, layers.by_stage(job, stages))
    parallel, size = job.parallel, stage_parts.message_bytes(job, model.hidden_bytes)
    apart = data * parallel.tensor_model_parallel_size * parallel.context_parallel_size
    link = system.message_link(parallel.pipeline_model_parallel_size, apart)
    stages_of = tuple(part.costs() for part in parts)
    return Costs(stages_of, hop_seconds(job, system, link, size), size)


def hop_seconds(job: Job, system: System, link: Link, size: float) -> float:
    """Return the seconds of a message of ``size`` bytes on ``link``.

    Where tensor-parallel ranks send parts of it, they gather it afterwards.
    """
    if not job.parallel.divides_messages:
        return link.seconds(size)
    ranks = job.parallel.tensor_model_parallel_size
    return link.seconds(size / ranks) + system.gather_seconds(size, ranks)


def message_bytes(job: Job) -> float:
    """Return the bytes of a message between stages, of the longest one where lengths vary."""
    return stage_parts.message_bytes(job, LayerCosts(job).hidden_bytes)
