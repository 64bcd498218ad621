"""What Megatron refuses of a model when it starts.

These are assertions of ``validate_args`` (megatron.training.arguments) or of the config of the model, the
optimizer or the gradients.
"""

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule


def fuses_bias(job: RequestedJob) -> bool:
    """Whether the activation is fused with the bias before it, by Megatron's own kernels."""
    model, fused = job.model, job.precision
    return fused.bias_swiglu_fusion if model.swiglu else fused.bias_gelu_fusion and model.add_bias_linear


def has_uneven_no_rope(job: RequestedJob) -> bool:
    """Whether every so many layers have no rotary positions, but no whole number of times."""
    every = job.flags.no_rope_freq
    return isinstance(every, int) and every > 0 and job.model.layers % every > 0


def has_delta_nets(job: RequestedJob) -> bool:
    """Whether the attention of some layers is a gated delta net."""
    return job.attention.experimental_attention_variant == "gated_delta_net"


ROWS = (
    # The size of the model.
    Rule(
        "--encoder-num-layers",
        "says the same as --num-layers",
        "leave one of the two out",
        when=lambda job: job.flags.encoder_num_layers not in (None, job.model.num_layers),
    ),
    Rule(
        "--encoder-seq-length",
        "says the same as --seq-length",
        "leave one of the two out",
        when=lambda job: job.flags.encoder_seq_length not in (None, job.model.seq_length),
    ),
    Rule(
        "--max-position-embeddings {max_position_embeddings}",
        "is less than --seq-length {seq_length}",
        "raise it to {seq_length} or more",
        when=lambda job: 0 < job.model.max_position_embeddings < job.model.seq_length,
    ),
    Rule(
        "--swiglu",
        "is another activation than --squared-relu and --quick-geglu",
        "leave it or the other out",
        when=lambda job: job.model.swiglu and (job.model.squared_relu or job.model.quick_geglu),
    ),
    Rule(
        "--squared-relu",
        "is not fused with biases",
        "add --no-bias-gelu-fusion or --disable-bias-linear",
        when=lambda job: job.model.squared_relu and not job.model.swiglu and fuses_bias(job),
    ),
    Rule(
        "--position-embedding-type mrope",
        "needs the sections of a head",
        "add --mrope-section",
        when=lambda job: job.model.position_embedding_type == "mrope" and not job.flags.mrope_section,
    ),
    Rule(
        "--no-position-embedding",
        "is no longer read",
        "give --position-embedding-type none",
        when=lambda job: (
            job.flags.add_position_embedding is False and job.model.position_embedding_type != "rope"
        ),
    ),
    Rule("--init-method-xavier-uniform", "is none of the settings of Megatron's models", "leave it out"),
    Rule(
        "--no-rope-freq {no_rope_freq}",
        "does not divide --num-layers {num_layers}",
        "change one of them",
        when=has_uneven_no_rope,
    ),
    # Attention.
    Rule(
        "--group-query-attention",
        "has no meaning for --multi-latent-attention",
        "leave one of the two out",
        when=lambda job: job.model.group_query_attention and job.attention.multi_latent_attention,
    ),
    Rule(
        "--mla-down-proj-fusion",
        "is for latent attention",
        "add --multi-latent-attention",
        when=lambda job: job.attention.mla_down_proj_fusion and not job.attention.multi_latent_attention,
    ),
    Rule(
        "--rope-type yarn",
        "is for latent attention",
        "give --position-embedding-type yarn",
        when=lambda job: job.flags.rope_type == "yarn" and not job.attention.multi_latent_attention,
    ),
    Rule(
        "--rope-type rope",
        "is not fused with --multi-latent-attention",
        "add --no-rope-fusion, or leave it out",
        when=lambda job: (
            job.flags.rope_type == "rope"
            and job.attention.multi_latent_attention
            and job.flags.apply_rope_fusion
            and job.model.position_embedding_type == "rope"
        ),
    ),
    Rule(
        "--rotary-interleaved",
        "has no meaning for --multi-latent-attention",
        "leave one of the two out",
        when=lambda job: job.flags.rotary_interleaved and job.attention.multi_latent_attention,
    ),
    Rule(
        "--linear-num-value-heads {linear_num_value_heads}",
        "is no multiple of --linear-num-key-heads {linear_num_key_heads}",
        "change one of them",
        when=lambda job: (
            has_delta_nets(job) and job.attention.linear_num_value_heads % job.attention.linear_num_key_heads
        ),
    ),
    # What divides its heads of keys divides those of values, which are a multiple of them.
    Rule(
        "--linear-num-key-heads {linear_num_key_heads}",
        "is no multiple of --tensor-model-parallel-size {tensor_model_parallel_size} x "
        "--context-parallel-size {context_parallel_size}",
        "lower one of these",
        when=lambda job: (
            has_delta_nets(job)
            and job.attention.linear_num_key_heads
            % (job.parallel.tensor_model_parallel_size * job.parallel.context_parallel_size)
        ),
    ),
    Rule(
        "--attention-backend local",
        "is for --spec local",
        "leave it out",
        when=lambda job: job.precision.attention_backend == "local",
    ),
    Rule(
        "--batch-invariant-mode",
        "needs --attention-backend flash",
        "add it",
        when=lambda job: job.flags.batch_invariant_mode and job.precision.attention_backend != "flash",
    ),
)
