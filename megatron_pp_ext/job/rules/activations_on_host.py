"""What cannot be where the activations of a step wait on the host by a plan."""

from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.schedule.names import AUTO

_OFFLOAD = "--pipeline-offload {pipeline_offload}"

_BESIDE = Rules(
    "Beside `--pipeline-offload`",
    lambda asked: asked.pipeline_offload is not None and asked.has_schedule,
    beside=_OFFLOAD,
    rows=(
        Rule(
            "--pipeline-schedule {pipeline_schedule}",
            "without a flush no step has a plan of its own",
            "choose a schedule that flushes, or leave it out",
            lambda asked: not asked.can.flushes,
        ),
        Rule("--fine-grained-activation-offloading", "both would move the same activations"),
        Rule("--pipeline-profile-steps", "its measurements know nothing of copies"),
        Rule(
            "--pipeline-vocabulary {pipeline_vocabulary}",
            "the compiler does not choose copies beside parts of a vocabulary",
            "give a share, such as 0.5",
            lambda asked: (
                asked.pipeline_offload == AUTO and asked.can.is_compiled and asked.pipeline_vocabulary
            ),
        ),
    ),
)

_HOST_BYTES = Rules(
    "Without `--pipeline-offload`",
    lambda asked: asked.pipeline_offload is None,
    rows=(
        Rule(
            "--pipeline-offload-host-bytes",
            "is for activations that wait on the host",
            f"leave it out, or add --pipeline-offload {AUTO}",
        ),
    ),
)

_SIZES = Rules(
    "Bytes of the host",
    lambda asked: asked.pipeline_offload_host_bytes is not None,
    rows=(
        Rule(
            "--pipeline-offload-host-bytes {pipeline_offload_host_bytes}",
            "must be above 0",
            "give the bytes that a rank's activations may take on the host",
            lambda asked: not asked.pipeline_offload_host_bytes > 0,
        ),
    ),
)

RULES = (_BESIDE, _HOST_BYTES, _SIZES)
