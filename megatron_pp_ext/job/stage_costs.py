"""The costs of stages that --pipeline-costs gives, and the sizes at which they were measured."""

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.flag_effects import flag
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.json_input import naming
from megatron_pp_ext.schedule.costs import Costs, in_files
from megatron_pp_ext.schedule.formats import costs_file

_SIZES = (
    "hidden_size",
    "seq_length",
    "micro_batch_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
"""The arguments that change the costs of a layer, and that a stage's costs do not show."""


def sizes(job: Job) -> dict[str, int]:
    """Return the sizes of ``job`` as ``Costs.sizes`` of a measurement has them."""
    return {name: job.value(name) for name in _SIZES}


def read(job: Job) -> Costs:
    """Return the costs in the file of --pipeline-costs.

    ValueError where the file states that they were measured at other sizes than ``job`` has.
    """
    file = job.pipeline.pipeline_costs
    assert file is not None
    costs = costs_file.read(file)
    sizes_of_job = sizes(job)
    for name, measured in costs.sizes.items():
        if name in sizes_of_job and sizes_of_job[name] and sizes_of_job[name] != measured:
            raise ValueError(
                f"--pipeline-costs {file} was measured with {flag(name)} {measured}, "
                f"not {sizes_of_job[name]}: measure the stages again, or give that size"
            )
    return costs


def cut(costs: Costs, job: Job, stages: int, splits_head: bool = False) -> Costs:
    """Return the costs of ``stages`` stages of ``job`` from ``costs``, read from --pipeline-costs.

    It has an object for each stage, or for each of several stages that are joined in one.  Where a layout
    states which layers a stage has, it may have one for each layer, the first with the embedding and the last
    with the loss.  ValueError for any other number, and where ranks split a head whose parts it does not
    have.
    """
    described, pipeline = layers.layout(job), job.pipeline
    if splits_head and costs.head is None:
        raise ValueError(
            f"--pipeline-costs {pipeline.pipeline_costs} has no costs of a rank's part of the head; add a "
            f'"{in_files("head")}", or leave it out'
        )
    if described is not None and len(described) == stages and len(costs.stages) == job.model.layers != stages:
        return costs.joined(layers.by_stage(job, stages))
    with naming(pipeline.pipeline_costs):
        return costs.merged(stages)
