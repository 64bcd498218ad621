"""The costs of stages that --pipeline-costs gives."""

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule import costs_file
from megatron_pp_ext.schedule.costs import Costs


def from_file(job: Job, stages: int) -> Costs:
    """Return the costs of ``stages`` stages from the file of --pipeline-costs.

    It has an object for each stage.  Where a layout says which layers a stage has, it may have one for each
    layer, the ends with embedding and loss.  ValueError for any other number.
    """
    file, described = job.pipeline.pipeline_costs, layers.layout(job)
    assert file is not None
    found = costs_file.read(file)
    is_by_layer = described is not None and len(found.stages) == job.model.layers != stages
    if is_by_layer and described is not None and len(described) == stages:
        return found.joined(layers.by_stage(job, stages))
    return costs_file.read(file, stages)
