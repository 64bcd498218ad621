"""What Megatron refuses of a batch, and of the cut into stages, when it starts.

These are assertions of ``validate_args`` (megatron.training.arguments) or of the config of the model, the
optimizer or the gradients.
"""

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule


def chunk_flag(job: RequestedJob) -> str:
    """Return the flag by which Megatron cuts a rank's layers into chunks; empty without one."""
    return next(filter(job.is_set, layers.CHUNKS), "")


def has_chunk_flag(job: RequestedJob) -> bool:
    """Whether a flag gives a rank several chunks."""
    return (layers.chunks_requested(job) or 1) > 1


def split_flag(job: RequestedJob) -> str:
    """Return the flag by which an end of the model counts as a layer; empty without one."""
    return next(filter(job.is_set, layers.SPREAD[len(layers.ENDS) :]), "")


def described_twice(job: RequestedJob) -> str:
    """Return the flag that spreads layers over stages in another way than a pattern; empty without one."""
    others = (*layers.SPREAD[len(layers.ENDS) :], *layers.CHUNKS, layers.LAYOUT)
    return next(filter(job.is_set, others), "")


def gives_two_patterns(job: RequestedJob) -> bool:
    """Whether two flags give different layers of a hybrid model."""
    own = job.model.pattern or ""
    return (job.flags.hybrid_override_pattern or own).partition("/")[0] != own


def ends_alone(job: RequestedJob) -> str:
    """Return the flag that gives an end of a pipeline its layers where there is none; empty without one."""
    is_alone = job.parallel.pipeline_model_parallel_size == 1
    return next(iter(layers.given_ends(job)), "") if is_alone else ""


ROWS = (
    Rule(
        "--step-batch-size-schedule: says the same as --global-batch-size; leave one of the two out",
        lambda job: (
            job.batch.step_batch_size_schedule is not None and job.batch.global_batch_size is not None
        ),
    ),
    Rule(
        "--num-layers-per-virtual-pipeline-stage: says the same as --num-virtual-stages-per-pipeline-rank; "
        "leave one of the two out",
        lambda job: (
            job.pipeline.num_layers_per_virtual_pipeline_stage is not None
            and job.pipeline.num_virtual_stages_per_pipeline_rank is not None
        ),
    ),
    Rule(
        "--pipeline-model-parallel-layout: says how many chunks a rank has; leave {chunk_flag} out",
        lambda job: job.pipeline.has_layout and chunk_flag(job),
        words=(chunk_flag,),
    ),
    Rule(
        "{split_flag}: says how layers are spread, as the first and the last rank's numbers do; leave one "
        "of the two out",
        lambda job: layers.given_ends(job) and split_flag(job),
        words=(split_flag,),
    ),
    Rule(
        "{described_twice}: is not for --hybrid-layer-pattern, whose | are between stages; leave it out",
        lambda job: job.model.hybrid_layer_pattern and described_twice(job),
        words=(described_twice,),
    ),
    Rule(
        "--hybrid-override-pattern: is the older name of --hybrid-layer-pattern; leave one of the two out",
        gives_two_patterns,
    ),
    Rule(
        "{ends_alone}: is for a pipeline of two ranks or more; leave it out", ends_alone, words=(ends_alone,)
    ),
    Rule(
        "{chunk_flag}: is for a pipeline of two ranks or more; leave it out",
        lambda job: (
            job.parallel.pipeline_model_parallel_size <= 1 and chunk_flag(job) and has_chunk_flag(job)
        ),
        words=(chunk_flag,),
    ),
    Rule(
        "--num-layers-per-virtual-pipeline-stage: is for ranks with as many layers each; give "
        "--num-virtual-stages-per-pipeline-rank in its place",
        lambda job: job.pipeline.num_layers_per_virtual_pipeline_stage is not None and layers.given_ends(job),
    ),
    Rule(
        "--defer-embedding-wgrad-compute: is for a pipeline of two ranks or more; leave it out",
        lambda job: (
            job.parallel.defer_embedding_wgrad_compute and job.parallel.pipeline_model_parallel_size <= 1
        ),
    ),
)
