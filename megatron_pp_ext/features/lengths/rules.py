"""What an order of microbatches by their lengths does not support."""

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.cuda_graphs import has_graphs
from megatron_pp_ext.job.rules.rule import Rule, Rules


def is_ordered(job: RequestedJob) -> bool:
    """Whether microbatches are ordered by their lengths."""
    return job.flags.pipeline_order in ("rule", "search")


def _is_planned_within_a_limit(job: RequestedJob) -> bool:
    """Whether list scheduling orders whole microbatches within a memory limit."""
    is_compiled = job.pipeline.has_schedule and job.pipeline.can.is_compiled
    return is_ordered(job) and is_compiled and job.pipeline.pipeline_slice_tokens is None


RULES = (
    Rules(
        title="What `--pipeline-order` needs",
        when=lambda job: job.flags.pipeline_order is not None,
        rows=(
            Rule(
                "--pipeline-order {pipeline_order}",
                "has no effect under Megatron's own schedules",
                "add --pipeline-schedule, 1f1b for example",
                when=lambda job: not job.pipeline.has_schedule,
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
                "its stages update their weights between microbatches, in the order of the data",
                "choose a schedule that flushes",
                when=lambda job: not job.pipeline.can.flushes,
            ),
            Rule(
                "--cuda-graph-impl {cuda_graph_impl}", "a graph holds the order of one step", when=has_graphs
            ),
            Rule("--rehearse-pipeline", "a rehearsal runs microbatches of one length"),
            Rule("--moe-enable-routing-replay", "routing is replayed in the order of its record"),
        ),
    ),
    Rules(
        title="With `--pipeline-order rule` or `search` under `flex` and `auto`",
        when=_is_planned_within_a_limit,
        subject="--pipeline-order {pipeline_order} under --pipeline-schedule {pipeline_schedule}",
        fix="leave one of them out, or choose a schedule by name, such as v-half",
        rows=(
            Rule(
                "--expert-model-parallel-size above 1",
                "pipelines that share experts plan by each other's lengths, by which none keeps its "
                "memory limit",
                when=lambda job: job.parallel.expert_model_parallel_size > 1,
            ),
            Rule("--pipeline-vocabulary", "list scheduling does not place the parts of a vocabulary"),
            Rule("--pipeline-offload", "copies are planned for one order"),
            Rule("--fine-grained-activation-offloading", "Megatron's offload is made for one order"),
        ),
    ),
)
