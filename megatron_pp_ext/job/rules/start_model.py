"""What Megatron refuses of a model when it starts.

These are assertions of ``validate_args`` (megatron.training.arguments) or of the config of the model, the
optimizer or the gradients.
"""

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule


def gives_two_depths(job: RequestedJob) -> bool:
    """Whether two flags give different numbers of layers."""
    return job.flags.encoder_num_layers not in (None, job.model.num_layers)


def gives_two_lengths(job: RequestedJob) -> bool:
    """Whether two flags give different lengths of sequences."""
    return job.flags.encoder_seq_length not in (None, job.model.seq_length)


def lacks_positions(job: RequestedJob) -> bool:
    """Whether sequences are longer than there are positions."""
    return 0 < job.model.max_position_embeddings < job.model.seq_length


def has_other_activation(job: RequestedJob) -> bool:
    """Whether a flag asks for another activation than SwiGLU."""
    return job.model.squared_relu or job.model.quick_geglu


def fuses_bias(job: RequestedJob) -> bool:
    """Whether the activation is fused with the bias before it, by Megatron's own kernels."""
    model, fused = job.model, job.precision
    return fused.bias_swiglu_fusion if model.swiglu else fused.bias_gelu_fusion and model.add_bias_linear


def fuses_rope(job: RequestedJob) -> bool:
    """Whether rotary positions are applied by one kernel."""
    return bool(job.flags.apply_rope_fusion) and job.model.position_embedding_type == "rope"


def has_uneven_no_rope(job: RequestedJob) -> bool:
    """Whether every so many layers have no rotary positions, but no whole number of times."""
    every = job.flags.no_rope_freq
    return isinstance(every, int) and every > 0 and job.model.layers % every > 0


ROWS = (
    # The size of the model.
    Rule(
        "--encoder-num-layers",
        when=gives_two_depths,
        why="says the same as --num-layers",
        fix="leave one of the two out",
    ),
    Rule(
        "--encoder-seq-length",
        when=gives_two_lengths,
        why="says the same as --seq-length",
        fix="leave one of the two out",
    ),
    Rule(
        "--max-position-embeddings {max_position_embeddings}",
        when=lacks_positions,
        why="is less than --seq-length {seq_length}",
        fix="raise it to {seq_length} or more",
    ),
    Rule(
        "--swiglu",
        when=lambda job: job.model.swiglu and has_other_activation(job),
        why="is another activation than --squared-relu and --quick-geglu",
        fix="leave it or the other out",
    ),
    Rule(
        "--squared-relu",
        when=lambda job: job.model.squared_relu and not job.model.swiglu and fuses_bias(job),
        why="is not fused with biases",
        fix="add --no-bias-gelu-fusion or --disable-bias-linear",
    ),
    Rule(
        "--position-embedding-type mrope",
        when=lambda job: job.model.position_embedding_type == "mrope" and not job.flags.mrope_section,
        why="needs the sections of a head",
        fix="add --mrope-section",
    ),
    Rule(
        "--no-position-embedding",
        when=lambda job: (
            job.flags.add_position_embedding is False and job.model.position_embedding_type != "rope"
        ),
        why="is no longer read",
        fix="give --position-embedding-type none",
    ),
    Rule(
        "--init-method-xavier-uniform", why="is none of the settings of Megatron's models", fix="leave it out"
    ),
    Rule(
        "--no-rope-freq {no_rope_freq}",
        when=has_uneven_no_rope,
        why="does not divide --num-layers {num_layers}",
        fix="change one of them",
    ),
    # Attention.
    Rule(
        "--group-query-attention",
        when=lambda job: job.model.group_query_attention and job.attention.multi_latent_attention,
        why="has no meaning for --multi-latent-attention",
        fix="leave one of the two out",
    ),
    Rule(
        "--mla-down-proj-fusion",
        when=lambda job: job.attention.mla_down_proj_fusion and not job.attention.multi_latent_attention,
        why="is for latent attention",
        fix="add --multi-latent-attention",
    ),
    Rule(
        "--rope-type yarn",
        when=lambda job: job.flags.rope_type == "yarn" and not job.attention.multi_latent_attention,
        why="is for latent attention",
        fix="give --position-embedding-type yarn",
    ),
    Rule(
        "--rope-type rope",
        when=lambda job: (
            job.flags.rope_type == "rope" and job.attention.multi_latent_attention and fuses_rope(job)
        ),
        why="is not fused with --multi-latent-attention",
        fix="add --no-rope-fusion, or leave it out",
    ),
    Rule(
        "--rotary-interleaved",
        when=lambda job: job.flags.rotary_interleaved and job.attention.multi_latent_attention,
        why="has no meaning for --multi-latent-attention",
        fix="leave one of the two out",
    ),
    Rule(
        "--attention-backend local",
        when=lambda job: job.precision.attention_backend == "local",
        why="is for --spec local",
        fix="leave it out",
    ),
    Rule(
        "--batch-invariant-mode",
        when=lambda job: job.flags.batch_invariant_mode and job.precision.attention_backend != "flash",
        why="needs --attention-backend flash",
        fix="add it",
    ),
)
