"""The costs of stages that --pipeline-costs gives."""

from argparse import Namespace

from megatron_pp_ext.job import layers
from megatron_pp_ext.schedule import costs_file
from megatron_pp_ext.schedule.costs import Costs


def from_file(args: Namespace, stages: int) -> Costs:
    """Return the costs of ``stages`` stages from the file of --pipeline-costs.

    It has an object for each stage.  Where a layout says which layers a stage has, it may have one for each
    layer, the ends with embedding and loss.  ValueError for any other number.
    """
    found = costs_file.read(args.pipeline_costs)
    described = layers.layout(args)
    is_by_layer = described is not None and len(found.stages) == layers.count(args) != stages
    if is_by_layer and described is not None and len(described) == stages:
        return found.joined(layers.by_stage(args, stages))
    return costs_file.read(args.pipeline_costs, stages)
