"""The limits of planned offloading: flags that it does not support."""

from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.schedule.entry import AUTO

RULES = (
    Rules(
        title="With `--pipeline-offload`",
        when=lambda job: job.pipeline.pipeline_offload is not None and job.pipeline.has_schedule,
        subject="--pipeline-offload {pipeline_offload}",
        rows=(
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                "without a flush no step has a plan of its own",
                "choose a schedule that flushes, or leave it out",
                when=lambda job: not job.pipeline.can.flushes,
            ),
            Rule("--fine-grained-activation-offloading", "both would move the same activations"),
            Rule("--pipeline-profile-steps", "its measurements know nothing of copies"),
            Rule(
                "--pipeline-vocabulary {pipeline_vocabulary}",
                "the compiler does not choose copies with parts of a vocabulary",
                "give a share, such as 0.5",
                when=lambda job: (
                    job.pipeline.pipeline_offload == AUTO
                    and job.pipeline.can.is_compiled
                    and job.pipeline.pipeline_vocabulary
                ),
            ),
        ),
    ),
    Rules(
        title="Without `--pipeline-offload`",
        when=lambda job: job.pipeline.pipeline_offload is None,
        rows=(
            Rule(
                "--pipeline-offload-host-bytes",
                "is for activations that wait on the host",
                "leave it out, or add --pipeline-offload auto",
            ),
        ),
    ),
    Rules(
        title="Bytes of the host",
        when=lambda job: job.pipeline.pipeline_offload_host_bytes is not None,
        rows=(
            Rule(
                "--pipeline-offload-host-bytes {pipeline_offload_host_bytes}",
                "must be above 0",
                "give the bytes that a rank's activations may take on the host",
                when=lambda job: (job.pipeline.pipeline_offload_host_bytes or 0) <= 0,
            ),
        ),
    ),
)
