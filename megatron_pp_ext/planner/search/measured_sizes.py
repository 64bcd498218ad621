"""The sizes that a search keeps because stages were measured at them, and the number of stages.

It then goes through schedules and memory limits; how many data-parallel ranks and microbatches there are
follows from the GPUs and the batch.
"""

from collections.abc import Collection

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.step.model_description import flag
from megatron_pp_ext.schedule.formats import costs_file

_SIZES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "pipeline_model_parallel_size",
    "micro_batch_size",
)
"""The sizes that change the costs of a stage; the experts' only in a model with experts."""

KEPT = frozenset((*_SIZES, "expert_tensor_parallel_size", "recompute_granularity"))
"""The arguments that stay as they are."""


def stages(job: Job, arguments: Collection[str]) -> int:
    """Return the number of stages into which the file of --pipeline-costs, or a flag, cuts the model.

    ``arguments`` are those that the user sets.  ValueError where these leave a size open, for tensor
    parallelism other than a search's, and for stages that ranks cannot share evenly.
    """
    file, parallel = job.pipeline.pipeline_costs, job.parallel
    assert file is not None
    sizes = [name for name in _SIZES if job.model.num_experts or name != "expert_model_parallel_size"]
    left_open = [flag(name) for name in sizes if name not in arguments]
    if left_open:
        raise ValueError(
            f"--pipeline-costs {file} has stages of one size, which a search keeps, but not "
            f"{', '.join(left_open)}: give what the stages were measured with"
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        raise ValueError(
            f"--pipeline-costs {file} of stages without --sequence-parallel: a search has it wherever there "
            "is tensor parallelism: measure the stages with it, and give it"
        )
    ranks = parallel.pipeline_model_parallel_size
    # Without a | in it, Megatron cuts a pattern for the ranks, and builds no more stages.
    uncut = ranks if job.model.pattern else len(costs_file.read(file).stages)
    count = layers.stages_described(job) or uncut
    if count % ranks:
        raise ValueError(
            f"--pipeline-costs {file} has {count} stages, which --pipeline-model-parallel-size {ranks} does "
            f"not divide: measure {ranks} or {2 * ranks} stages"
        )
    return count


def described(job: Job, count: int) -> str:
    """Return the fixed and the free sizes of a search of ``count`` measured stages, in words."""
    sizes = ", ".join(f"{flag(name)} {job.value(name)}" for name in _SIZES)
    return (
        f"The {count} stages in {job.pipeline.pipeline_costs} and {sizes} stay; schedules and memory limits "
        "are tried.  Other --gpus and batches have other data-parallel sizes and microbatches."
    )
