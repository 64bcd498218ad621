"""The number of chunks a rank that Megatron's own flags request, and whether a schedule has as many."""

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.typed_job import Job


def chunks_requested(job: Job) -> int | None:
    """The chunks a rank that Megatron's own flags request; None where they do not."""
    ranks, given = job.parallel.pipeline_model_parallel_size, job.pipeline
    stages = layers.stages_described(job)
    if stages is not None:
        if stages % ranks:
            raise ValueError(
                f"{_stages_flag(job)} has {stages} stages, which {ranks} pipeline ranks cannot "
                f"share evenly; give it {ranks} or {2 * ranks} stages"
            )
        return stages // ranks
    if given.num_virtual_stages_per_pipeline_rank is not None:
        return given.num_virtual_stages_per_pipeline_rank
    each = given.num_layers_per_virtual_pipeline_stage
    if each is not None:
        by_rank = layers.spread(job) // ranks
        if by_rank % each:
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage {each} does not divide the {by_rank} layers of a "
                "pipeline rank; set it to a number that does, or leave it out"
            )
        return max(1, by_rank // each)
    return None


def require_chunks(
    job: Job, name: str, requested: int | None, chunks: int, accepted: bool, more: str
) -> None:
    """ValueError where Megatron's own flags request chunks that the schedule does not have."""
    stages = chunks * job.parallel.pipeline_model_parallel_size
    letters = job.model.pattern
    if requested is None and letters and chunks > 1:
        raise ValueError(
            f"--pipeline-schedule {name} has {stages} stages, between which --hybrid-layer-pattern needs "
            f"a |; write it as {layers.cut_evenly(letters, stages)}, for example"
        )
    if accepted:
        return
    if layers.stages_described(job) is not None:
        flag, fix = _stages_flag(job), f"give it {stages} stages"
    elif job.pipeline.num_virtual_stages_per_pipeline_rank is not None:
        flag, fix = "--num-virtual-stages-per-pipeline-rank", f"set it to {chunks}"
    else:
        flag, fix = "--num-layers-per-virtual-pipeline-stage", "leave it out"
    raise ValueError(
        f"--pipeline-schedule {name} has {chunks}{more} chunk(s) a rank, but {flag} requests "
        f"{requested}; {fix}, or choose another schedule"
    )


def _stages_flag(job: Job) -> str:
    return "--hybrid-layer-pattern" if job.model.pattern else "--pipeline-model-parallel-layout"
