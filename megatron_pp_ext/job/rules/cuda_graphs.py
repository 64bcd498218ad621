"""What CUDA graphs do not support under a schedule of this package."""

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule, Rules


def has_graphs(job: RequestedJob, kind: str | None = None) -> bool:
    """Whether CUDA graphs are captured, or those of a ``kind``."""
    found = job.precision.cuda_graph_impl
    return found != "none" if kind is None else found == kind


RULES = Rules(
    title="With CUDA graphs",
    when=lambda job: job.pipeline.has_schedule and has_graphs(job),
    subject="--cuda-graph-impl {cuda_graph_impl}",
    rows=(
        Rule(
            "--pipeline-schedule {pipeline_schedule}",
            "without a flush no step is like the first one",
            "choose a schedule that flushes, or leave the graphs out",
            when=lambda job: not job.pipeline.can.flushes,
        ),
        Rule(
            "a schedule that changes",
            "a graph holds one order",
            "choose a schedule that stays as it is, such as 1f1b",
            when=lambda job: job.changes_its_order,
        ),
        Rule("--rampup-batch-size", "a graph holds one number of microbatches"),
        Rule("--step-batch-size-schedule", "a graph holds one number of microbatches"),
        Rule(
            "--cuda-graph-warmup-steps 0",
            "the first step finds the order, which graphs are made for",
            "set it to 1 or more",
        ),
        Rule("--pipeline-offload", "the host waits for copies, and saved tensors are the graph's"),
        Rule(
            "--recompute-granularity full",
            "a layer that runs again would take the graph of another microbatch",
            "choose selective, or --cuda-graph-impl full_iteration",
            when=lambda job: has_graphs(job, "transformer_engine") and job.memory.recomputes_layers,
        ),
        Rule(
            "--pipeline-trace",
            "actions within a graph have no times",
            when=lambda job: has_graphs(job, "full_iteration") and job.is_set("--pipeline-trace"),
        ),
        Rule(
            "--mtp-num-layers",
            "a V moves the losses of predictions to another rank, which a graph adds up",
            "choose a schedule that is no V, such as interleaved",
            when=lambda job: has_graphs(job, "full_iteration") and job.is_v and job.model.mtp_num_layers,
        ),
    ),
)
