"""What slices of sequences do not support."""

from megatron_pp_ext.features.lengths.rules import is_ordered
from megatron_pp_ext.job.attention_part import sees_later
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.cuda_graphs import has_graphs
from megatron_pp_ext.job.rules.rule import Rule, Rules


def _cuts(job: RequestedJob) -> bool:
    """Whether sequences may be cut: not where all have one length, as long as a slice."""
    tokens, sequence = job.pipeline.pipeline_slice_tokens, job.model.seq_length
    if tokens is None:
        return False
    return not sequence or isinstance(tokens, str) or tokens < sequence or is_ordered(job)


def has_states(job: RequestedJob) -> bool:
    """Whether layers of a hybrid model carry a state from token to token."""
    return any(letter in "MG" for letter in job.model.hybrid_layer_pattern or "")


RULES = (
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
                "--mtp-num-layers",
                "the prediction at a slice's end needs tokens of the next slice, and the model divides "
                "its loss by the tokens of the call",
            ),
            Rule(
                "--window-size {window_size}",
                "a token would see later ones, whose keys come with the next slice",
                "give 0 as its second number",
                when=lambda job: sees_later(job.attention.window_size),
            ),
            Rule(
                "--experimental-attention-variant",
                "the state of such attention is not carried from slice to slice",
            ),
            Rule(
                "--hybrid-layer-pattern with M or G",
                "the state of Mamba and of a gated delta net is not carried from slice to slice",
                when=has_states,
            ),
            Rule(
                "--cuda-graph-impl {cuda_graph_impl}",
                "attention has another number of keys in each slice",
                when=has_graphs,
            ),
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
