"""The costs of a model's stages, from the arithmetic of its layers.

Seconds are proportional to floating-point operations, activations and messages are counted in bytes, and
messages take no time.
"""

from megatron_pp_ext.costs import stage_parts
from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.job import layers
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.costs import Costs


def stage_costs(job: Job, stages: int, rows: int, splits_head: bool = False) -> Costs:
    """Return the costs of ``stages`` stages, cut as Megatron will cut them; hops are free.

    The embedding has ``rows`` rows.  With ``splits_head`` every rank of the pipeline has a part of it
    and of the output layer.

    ValueError where ``job`` does not determine them.
    """
    model = model_parts(job, vocabulary=rows)
    parts = stage_parts.stage_parts(job, model, layers.by_stage(job, stages), splits_head)
    shared = stage_parts.head_costs(job, model) if splits_head else None
    return Costs(tuple(part.costs() for part in parts), message=message_bytes(job), head=shared)


def message_bytes(job: Job) -> float:
    """Return the bytes of a message between stages, of the longest one where lengths vary."""
    return stage_parts.message_bytes(job, LayerCosts(job).hidden_bytes)
