"""What a backward in two halves does not support."""

from megatron_pp_ext.job.requested_job import ENGINE, RequestedJob
from megatron_pp_ext.job.rules.rule import Rule, Rules


def engine(job: RequestedJob) -> str:
    """Return the version of Transformer Engine on the machine that trains."""
    return job.releases.get(ENGINE, "")


def gathers_weights(job: RequestedJob) -> bool:
    """Whether weights are cut into more parts than tensor-parallel ranks, and gathered for each use."""
    return (job.flags.tensor_parallel_num_weight_shards or 0) > job.parallel.tensor_model_parallel_size


RULES = Rules(
    title="Where the backward is split",
    when=lambda job: job.splits and job.pipeline.has_schedule,
    subject="--pipeline-schedule {pipeline_schedule}",
    rows=(
        Rule(
            "--transformer-impl transformer_engine",
            "layers of Transformer Engine {engine} cannot leave their weight gradient for later",
            "install transformer-engine 2.3 or newer, or add --transformer-impl local",
            releases="transformer-engine<2.3",
            words=(engine,),
        ),
        Rule(
            "--tp-comm-overlap",
            "with --fp8-recipe mxfp8 gradients are gathered for W into buffers that later layers overwrite",
            "choose another recipe, or leave it out",
            when=lambda job: (
                job.parallel.tp_comm_overlap and job.precision.fp8 and job.precision.fp8_recipe == "mxfp8"
            ),
        ),
        Rule("--overlap-dispatch-backward-with-experts-wgrad", "schedules defer weight gradients themselves"),
        Rule(
            "--tensor-parallel-num-weight-shards",
            "a weight that is gathered for each use has no gradient to leave for later",
            when=gathers_weights,
        ),
        Rule(
            "--expert-tensor-parallel-num-weight-shards",
            "a weight that is gathered for each use has no gradient to leave for later",
            when=lambda job: (
                (job.flags.expert_tensor_parallel_num_weight_shards or 0) > job.parallel.expert_tensor
            ),
        ),
    ),
)
