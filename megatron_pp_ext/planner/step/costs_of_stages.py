"""The costs of a model's stages, from the arithmetic of its layers.

Seconds are proportional to floating-point operations, activations and messages are counted in bytes, and
messages take no time.
"""

from argparse import Namespace

from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.job import layers
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.step import workload
from megatron_pp_ext.planner.step.model_parts import model_parts
from megatron_pp_ext.planner.step.stage_parts import shared_vocabulary, stage_parts
from megatron_pp_ext.schedule.costs import Costs


def stage_costs(args: Namespace, stages: int, rows: int, shares_vocabulary: bool = False) -> Costs:
    """Return the costs of ``stages`` stages, cut as Megatron will cut them; hops are free.

    The embedding has ``rows`` rows.  With ``shares_vocabulary`` every rank of the pipeline has a part of it
    and of the output layer.

    ValueError where the arguments do not determine them.
    """
    model = model_parts(Job.of(args), vocabulary=rows)
    parts = stage_parts(args, model, layers.by_stage(args, stages), shares_vocabulary)
    shared = shared_vocabulary(args, model) if shares_vocabulary else None
    return Costs(tuple(part.costs() for part in parts), message=message_bytes(args), vocabulary=shared)


def message_bytes(args: Namespace) -> float:
    """Return the bytes of a message between stages, of the longest one where lengths vary."""
    return workload.message_bytes(args, LayerCosts(Job.of(args)).hidden_bytes)
