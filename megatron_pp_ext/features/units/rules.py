"""What an order of microbatches, and slices of sequences, do not support."""

from megatron_pp_ext.job.parts import sees_later
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.job.rules.schedules import has_graphs
from megatron_pp_ext.job.typed_job import Job


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
                "--cuda-graph-impl {cuda_graph_impl}",
                "a graph holds one length of microbatches",
                when=has_graphs,
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


def _is_sparse(job: RequestedJob) -> bool:
    """Whether layers have sparse attention."""
    return job.attention.experimental_attention_variant == "dsa" or "D" in (
        job.model.hybrid_layer_pattern or ""
    )


def ranks_of_sequence(job: Job) -> int:
    """Return how many ranks share the tokens of a slice between layers."""
    return job.parallel.context_parallel_size * job.parallel.sequence_ranks


def has_states(job: Job) -> bool:
    """Whether some layers are recurrent: Mamba-2 or gated delta nets."""
    model, attention = job.model, job.attention
    if model.hybrid_layer_pattern:
        return any(letter in "MG" for letter in model.hybrid_layer_pattern)
    return any(attention.letter(number) == "G" for number in range(1, (model.num_layers or 0) + 1))


def may_share(job: Job) -> bool:
    """Whether the context-parallel ranks of ``job`` may share slices, by what the model has."""
    ranks = job.parallel.context_parallel_size
    has_others = job.attention.softmax_type != "vanilla" or has_states(job)
    return ranks == 1 or not (has_others or heads_of_rank(job) % ranks)


def heads_of_rank(job: Job) -> int:
    """Return the heads of attention of a tensor-parallel rank."""
    return job.model.num_attention_heads // job.parallel.tensor_model_parallel_size


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
            Rule(
                "--pipeline-slice-tokens {pipeline_slice_tokens}",
                "cannot be shared out over --context-parallel-size {context_parallel_size}, each of whose "
                "ranks has as many tokens of a slice for its tensor-parallel ranks",
                "give a multiple of {ranks_of_sequence}",
                when=lambda job: (
                    isinstance(job.pipeline.pipeline_slice_tokens, int)
                    and job.pipeline.pipeline_slice_tokens % ranks_of_sequence(job)
                ),
                words=(ranks_of_sequence,),
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
                "--window-size {window_size}",
                "a token would see later ones, whose keys come with the next slice",
                "give 0 as its second number",
                when=lambda job: sees_later(job.attention.window_size),
            ),
            Rule(
                "--dsa-kernel-backend {dsa_kernel_backend}",
                "its kernels know no keys before the first query",
                when=lambda job: _is_sparse(job) and job.attention.dsa_kernel_backend != "none",
            ),
            Rule(
                "--dsa-indexer-topk-freq {dsa_indexer_topk_freq}",
                "layers look for the choice that they share by a mask that all of them get, and each "
                "layer of a slice has its own",
                when=lambda job: _is_sparse(job) and job.attention.dsa_indexer_topk_freq > 1,
            ),
            Rule(
                "--sequence-parallel with sparse attention",
                "that takes as many keys as queries there",
                when=lambda job: _is_sparse(job) and job.parallel.sequence_ranks > 1,
            ),
            Rule(
                "--disable-mamba-mem-eff-path",
                "slices hand states to Mamba-2's fused kernel, which it leaves out",
                when=lambda job: (
                    "M" in (job.model.hybrid_layer_pattern or "")
                    and job.argument("use_mamba_mem_eff_path") is False
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

_SHARED_SLICE_RULES = (
    Rules(
        title="With `--pipeline-slice-tokens` and context parallelism",
        when=lambda job: _cuts(job) and job.parallel.context_parallel_size > 1,
        subject="--pipeline-slice-tokens {pipeline_slice_tokens} with context parallelism",
        rows=(
            Rule(
                "--num-attention-heads {num_attention_heads}",
                "its ranks exchange tokens for whole heads, and {heads_of_rank} of a tensor-parallel rank "
                "cannot be divided among {context_parallel_size}",
                "give a --context-parallel-size that divides them",
                when=lambda job: heads_of_rank(job) % job.parallel.context_parallel_size,
                words=(heads_of_rank,),
            ),
            Rule(
                "--cp-comm-type a2a+p2p",
                "its ranks exchange heads in one level",
                "choose a2a, with a --context-parallel-size of ranks within a node",
            ),
            Rule(
                "--softmax-type {softmax_type}",
                "each rank attends for a part of the heads, and the numbers for all would be added to them",
                when=lambda job: job.attention.softmax_type != "vanilla",
            ),
            Rule(
                "--hybrid-layer-pattern with M or G",
                "Megatron's exchange for such layers takes the order of whole sequences",
                when=has_states,
            ),
            Rule(
                "--experimental-attention-variant dsa",
                "its indexer chooses for all heads, and each rank would attend for a part of them",
                when=_is_sparse,
            ),
            Rule("--qk-clip", "the maximum of each head is counted where all heads are"),
            Rule(
                "--position-embedding-type mrope",
                "such positions are divided by halves of the whole sequence",
            ),
        ),
    ),
)

RULES = (*_ORDER_RULES, *_SLICE_RULES, *_SHARED_SLICE_RULES)
