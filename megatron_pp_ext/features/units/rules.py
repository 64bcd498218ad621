"""What an order of microbatches, and slices of sequences, do not support."""

from megatron_pp_ext.job.parts import sees_later
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.job.rules.schedules import has_graphs


def is_ordered(job: RequestedJob) -> bool:
    """Whether microbatches are ordered by their lengths."""
    return job.flags.pipeline_order in ("rule", "search")


def _is_planned_within_a_limit(job: RequestedJob) -> bool:
    """Whether list scheduling orders whole microbatches within a memory limit."""
    is_compiled = job.pipeline.has_schedule and job.pipeline.can.is_compiled
    return is_ordered(job) and is_compiled and job.pipeline.pipeline_slice_tokens is None


_ORDER_RULES = (
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


def _cuts(job: RequestedJob) -> bool:
    """Whether sequences may be cut: not where all have one length, as long as a slice."""
    tokens, sequence = job.pipeline.pipeline_slice_tokens, job.model.seq_length
    if tokens is None:
        return False
    return not sequence or isinstance(tokens, str) or tokens < sequence or is_ordered(job)


def _has_unknown_attention(job: RequestedJob) -> bool:
    """Whether the attention's own state, besides keys and values, is not one that slices hand on."""
    return job.attention.experimental_attention_variant not in (None, "gated_delta_net")


_SLICE_RULES = (
    Rules(
        title="What `--pipeline-slice-tokens` needs",
        when=lambda job: job.pipeline.pipeline_slice_tokens is not None,
        rows=(
            Rule(
                "--pipeline-slice-tokens {pipeline_slice_tokens}",
                "has no effect under Megatron's own schedules",
                "add --pipeline-schedule, v-half for example",
                when=lambda job: not job.pipeline.has_schedule,
            ),
            Rule(
                "--pipeline-slice-tokens {pipeline_slice_tokens}",
                "cannot be shared out over --tensor-model-parallel-size {tensor_model_parallel_size} "
                "under --sequence-parallel",
                "give a multiple of that size",
                when=lambda job: (
                    isinstance(job.pipeline.pipeline_slice_tokens, int)
                    and job.pipeline.pipeline_slice_tokens % job.parallel.sequence_ranks
                ),
            ),
        ),
    ),
    Rules(
        title="Without `--pipeline-slice-tokens`",
        when=lambda job: job.pipeline.pipeline_slice_tokens is None,
        rows=(
            Rule(
                "--pipeline-slice-check",
                "is about slices",
                "leave it out, or add --pipeline-slice-tokens auto",
            ),
        ),
    ),
    Rules(
        title="With `--pipeline-slice-tokens`",
        when=_cuts,
        subject="--pipeline-slice-tokens {pipeline_slice_tokens}",
        rows=(
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                "stages that update their weights by themselves would do so within a sequence",
                "choose a schedule that flushes",
                when=lambda job: not job.pipeline.can.flushes,
            ),
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                "the file orders microbatches, whose backwards need not be in reverse",
                "choose a schedule by name",
                when=lambda job: job.pipeline.can.file,
            ),
            Rule(
                "--context-parallel-size above 1",
                "each of its ranks has two pieces of the whole sequence, so that a slice's tokens would "
                "be on some of them",
                when=lambda job: job.parallel.context_parallel_size > 1,
            ),
            Rule(
                "--window-size {window_size}",
                "a token would see later ones, whose keys come with the next slice",
                "give 0 as its second number",
                when=lambda job: sees_later(job.attention.window_size),
            ),
            Rule(
                "--experimental-attention-variant {experimental_attention_variant}",
                "the state of such attention is not carried from slice to slice",
                when=lambda job: (
                    job.attention.experimental_attention_variant not in (None, "gated_delta_net")
                ),
            ),
            Rule(
                "--disable-mamba-mem-eff-path",
                "slices hand states to Mamba-2's fused kernel, which it leaves out",
                when=lambda job: (
                    "M" in (job.model.hybrid_layer_pattern or "")
                    and job.is_set("--disable-mamba-mem-eff-path")
                ),
            ),
            Rule(
                "--cuda-graph-impl {cuda_graph_impl}",
                "attention has another number of keys in each slice",
                when=has_graphs,
            ),
            Rule("--moe-enable-routing-replay", "routing is recorded and replayed by whole microbatches"),
            Rule("--tp-comm-overlap", "its buffers have the size of whole sequences"),
            Rule("--fine-grained-activation-offloading", "it counts whole microbatches"),
            Rule("--pipeline-offload", "slices share the keys and values that it would move"),
            Rule("--pipeline-vocabulary", "its exchanges are of whole microbatches"),
            Rule("--pipeline-profile-steps", "what it compiles orders whole microbatches"),
            Rule("--rehearse-pipeline", "a rehearsal tells the costs of whole microbatches"),
            Rule("--overlap-moe-expert-parallel-comm", "Megatron plans layers of whole sequences"),
        ),
    ),
)

RULES = (*_ORDER_RULES, *_SLICE_RULES)
