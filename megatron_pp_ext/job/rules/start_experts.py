"""What Megatron refuses of experts, and of multi-token prediction, when it starts.

These are assertions of ``validate_args`` (megatron.training.arguments) or of the config of the model, the
optimizer or the gradients.
"""

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule


def has_layers_without_experts(job: RequestedJob) -> bool:
    """Whether --moe-layer-freq says that some layers have no experts."""
    every = job.model.moe_layer_freq
    return 0 in every if isinstance(every, tuple) else every > 1


def has_cut_biases(job: RequestedJob) -> bool:
    """Whether tensor-parallel ranks share experts that have biases."""
    model = job.model
    return bool(model.num_experts and model.add_bias_linear and job.parallel.expert_tensor > 1)


def has_uneven_groups(job: RequestedJob) -> bool:
    """Whether groups of experts, among which routers choose, are not equally large."""
    groups = job.model.moe_router_num_groups if job.model.moe_router_group_topk else 0
    return bool(groups and job.model.num_experts % groups)


def has_too_few_groups(job: RequestedJob) -> bool:
    """Whether a router is to choose more groups of experts than there are."""
    chosen, groups = job.model.moe_router_group_topk or 0, job.model.moe_router_num_groups
    return bool(groups and chosen > groups)


def has_zero_gradient(job: RequestedJob) -> bool:
    """Whether a score of one expert alone would be normalized to 1."""
    is_softmax = job.flags.moe_router_score_function in (None, "softmax")
    is_sinkhorn = "sinkhorn" in str(job.flags.moe_router_load_balancing_type)
    return is_softmax and not is_sinkhorn and not job.flags.moe_router_pre_softmax


def can_pad_routing(job: RequestedJob) -> bool:
    """Whether there is something to pad tokens for, and a dispatcher that does."""
    is_padded = job.parallel.moe_token_dispatcher_type in ("alltoall", "flex")
    return is_padded and bool(job.precision.fp8 or job.precision.fp4)


ROWS = (
    # Experts.
    Rule(
        "--moe-ffn-hidden-size",
        "is for a model with experts",
        "add --num-experts, or leave it out",
        when=lambda job: (
            job.model.moe_ffn_hidden_size
            and not job.model.num_experts
            and not has_layers_without_experts(job)
        ),
    ),
    Rule(
        "--moe-latent-size",
        "is for a model with experts",
        "add --num-experts, or leave it out",
        when=lambda job: job.model.moe_latent_size and not job.model.num_experts,
    ),
    Rule(
        "--num-experts with biases",
        "is for an --expert-tensor-parallel-size of 1",
        "add --disable-bias-linear, or set the latter",
        when=has_cut_biases,
    ),
    Rule(
        "--moe-router-num-groups {moe_router_num_groups}",
        "does not divide --num-experts {num_experts}",
        "change one of them",
        when=has_uneven_groups,
    ),
    Rule(
        "--moe-router-group-topk {moe_router_group_topk}",
        "is more than --moe-router-num-groups {moe_router_num_groups}",
        "lower it",
        when=has_too_few_groups,
    ),
    Rule(
        "--moe-router-group-topk",
        "needs the number of groups",
        "add --moe-router-num-groups",
        when=lambda job: job.model.moe_router_group_topk and not job.model.moe_router_num_groups,
    ),
    Rule(
        "--moe-router-topk 1",
        "has no gradient where scores are normalized after the choice",
        "add --moe-router-pre-softmax",
        when=lambda job: job.model.moe_router_topk == 1 and has_zero_gradient(job),
    ),
    Rule(
        "--moe-router-enable-expert-bias",
        "is for --moe-router-score-function sigmoid or sqrtsoftplus",
        "choose one of these",
        when=lambda job: (
            job.flags.moe_router_enable_expert_bias
            and job.flags.moe_router_score_function not in ("sigmoid", "sqrtsoftplus")
        ),
    ),
    Rule(
        "--moe-shared-expert-overlap",
        "is for --moe-token-dispatcher-type alltoall or flex",
        "choose one of these",
        when=lambda job: (
            job.flags.moe_shared_expert_overlap
            and job.model.moe_shared_expert_intermediate_size
            and job.parallel.moe_token_dispatcher_type not in ("alltoall", "flex")
        ),
    ),
    Rule(
        "--moe-flex-dispatcher-backend ncclep",
        "is for --moe-token-dispatcher-type flex",
        "choose that",
        when=lambda job: (
            job.parallel.moe_flex_dispatcher_backend == "ncclep"
            and job.parallel.moe_token_dispatcher_type != "flex"
        ),
    ),
    Rule(
        "--moe-enable-deepep",
        "is for --moe-token-dispatcher-type flex",
        "choose that",
        when=lambda job: job.flags.moe_enable_deepep and job.parallel.moe_token_dispatcher_type != "flex",
    ),
    Rule(
        "--moe-pad-expert-input-to-capacity",
        "has no capacity",
        "add --moe-expert-capacity-factor",
        when=lambda job: job.model.moe_pad_expert_input_to_capacity and job.model.expert_capacity is None,
    ),
    Rule(
        "--moe-pad-expert-input-to-capacity",
        "is not for --moe-flex-dispatcher-backend deepep",
        "choose hybridep, or --moe-token-dispatcher-type alltoall",
        when=lambda job: (
            job.model.moe_pad_expert_input_to_capacity
            and job.parallel.moe_token_dispatcher_type == "flex"
            and job.parallel.moe_flex_dispatcher_backend == "deepep"
        ),
    ),
    Rule(
        "--moe-expert-capacity-factor",
        "is not for --moe-router-load-balancing-type sinkhorn",
        "choose aux_loss, seq_aux_loss, global_aux_loss or none",
        when=lambda job: (
            job.model.moe_expert_capacity_factor is not None
            and "sinkhorn" in str(job.flags.moe_router_load_balancing_type)
        ),
    ),
    Rule(
        "--moe-expert-capacity-factor 0",
        "drops every token",
        "raise it",
        when=lambda job: job.model.expert_capacity == 0,
    ),
    Rule(
        "--moe-expert-rank-capacity-factor",
        "is for --moe-flex-dispatcher-backend hybridep or ncclep",
        "choose one of these",
        when=lambda job: (
            job.flags.moe_expert_rank_capacity_factor is not None
            and job.parallel.moe_flex_dispatcher_backend not in ("hybridep", "ncclep")
        ),
    ),
    Rule(
        "--moe-paged-stash",
        "keeps as many tokens as --moe-expert-rank-capacity-factor says",
        "add that flag",
        when=lambda job: job.precision.moe_paged_stash and job.flags.moe_expert_rank_capacity_factor is None,
    ),
    Rule(
        "--moe-single-grouped-weight",
        "needs --moe-grouped-gemm and --use-transformer-engine-op-fuser",
        "add both, or leave it out",
        when=lambda job: (
            job.flags.moe_single_grouped_weight and not job.precision.use_transformer_engine_op_fuser
        ),
    ),
    Rule(
        "--moe-single-grouped-bias",
        "is for experts with biases",
        "leave it out",
        when=lambda job: job.flags.moe_single_grouped_bias and not job.model.add_bias_linear,
    ),
    Rule(
        "--moe-single-grouped-weight or --moe-single-grouped-bias",
        "is for --moe-grouped-gemm",
        "add it",
        when=lambda job: (
            (job.flags.moe_single_grouped_weight or job.flags.moe_single_grouped_bias)
            and not job.precision.moe_grouped_gemm
        ),
    ),
    Rule(
        "--moe-router-padding-for-quantization",
        "is for --fp8-format and --moe-token-dispatcher-type alltoall or flex",
        "leave it out",
        when=lambda job: (
            (job.flags.moe_router_padding_for_fp8 or job.flags.moe_router_padding_for_quantization)
            and not can_pad_routing(job)
        ),
    ),
    Rule(
        "--moe-use-upcycling",
        "saves what it makes",
        "add --save",
        when=lambda job: job.flags.moe_use_upcycling and not job.flags.save,
    ),
    # Multi-token prediction.
    Rule(
        "--mtp-num-layers",
        "is for --position-embedding-type rope or none",
        "choose one of these",
        when=lambda job: (
            job.model.mtp_num_layers and job.model.position_embedding_type not in ("rope", "none")
        ),
    ),
)
