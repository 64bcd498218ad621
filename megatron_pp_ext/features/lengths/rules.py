"""What an order of microbatches by their lengths does not support."""

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.cuda_graphs import has_graphs
from megatron_pp_ext.job.rules.rule import Rule, Rules

PACKED = "--sft", "--dataloader-inter-document-masking"
"""The flags by which microbatches have documents of unlike length; some releases lack some of them."""


def has_packed(job: RequestedJob) -> bool:
    """Whether the job's microbatches have documents of unlike length, among which attention does not go."""
    return any(map(job.is_set, PACKED))


def is_ordered(job: RequestedJob) -> bool:
    """Whether microbatches are ordered by their lengths."""
    return job.flags.pipeline_order in ("rule", "search")


RULES = (
    Rules(
        title="What `--pipeline-order` needs",
        when=lambda job: job.flags.pipeline_order is not None,
        rows=(
            Rule(
                "--pipeline-order {pipeline_order}",
                when=lambda job: not job.pipeline.has_schedule,
                why="has no effect under Megatron's own schedules",
                fix="add --pipeline-schedule, 1f1b for example",
            ),
        ),
    ),
    Rules(
        title="With `--pipeline-order rule` or `search`",
        when=is_ordered,
        subject="--pipeline-order {pipeline_order}",
        rows=(
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                when=lambda job: not job.pipeline.can.flushes,
                why="its stages update their weights between microbatches, in the order of the data",
                fix="choose a schedule that flushes",
            ),
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                when=lambda job: job.pipeline.can.is_compiled and job.pipeline.pipeline_slice_tokens is None,
                why="its memory limit is kept for equal microbatches alone",
                fix="choose a schedule by name, such as v-half, or add --pipeline-slice-tokens",
            ),
            Rule(
                "--cuda-graph-impl {cuda_graph_impl}",
                when=has_graphs,
                why="a graph holds the order of one step",
            ),
            Rule("--rehearse-pipeline", why="a rehearsal runs microbatches of one length"),
        ),
    ),
)
