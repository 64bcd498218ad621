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


def has_single_group(job: RequestedJob) -> bool:
    """Whether weights or biases of all experts are one tensor."""
    return bool(job.flags.moe_single_grouped_weight or job.flags.moe_single_grouped_bias)


def pads_routing(job: RequestedJob) -> bool:
    """Whether each expert's tokens are padded for products in FP8."""
    return bool(job.flags.moe_router_padding_for_fp8 or job.flags.moe_router_padding_for_quantization)


def can_pad_routing(job: RequestedJob) -> bool:
    """Whether there is something to pad tokens for, and a dispatcher that does."""
    is_padded = job.parallel.moe_token_dispatcher_type in ("alltoall", "flex")
    return is_padded and bool(job.precision.fp8 or job.precision.fp4)


ROWS = (
    # Experts.
    Rule(
        "--moe-ffn-hidden-size",
        when=lambda job: (
            job.model.moe_ffn_hidden_size
            and not job.model.num_experts
            and not has_layers_without_experts(job)
        ),
        why="is for a model with experts",
        fix="add --num-experts, or leave it out",
    ),
    Rule(
        "--moe-latent-size",
        when=lambda job: job.model.moe_latent_size and not job.model.num_experts,
        why="is for a model with experts",
        fix="add --num-experts, or leave it out",
    ),
    Rule(
        "--num-experts with biases",
        when=has_cut_biases,
        why="is for an --expert-tensor-parallel-size of 1",
        fix="add --disable-bias-linear, or set the latter",
    ),
    Rule(
        "--moe-router-num-groups {moe_router_num_groups}",
        when=has_uneven_groups,
        why="does not divide --num-experts {num_experts}",
        fix="change one of them",
    ),
    Rule(
        "--moe-router-group-topk {moe_router_group_topk}",
        when=has_too_few_groups,
        why="is more than --moe-router-num-groups {moe_router_num_groups}",
        fix="lower it",
    ),
    Rule(
        "--moe-router-group-topk",
        when=lambda job: job.model.moe_router_group_topk and not job.model.moe_router_num_groups,
        why="needs the number of groups",
        fix="add --moe-router-num-groups",
    ),
    Rule(
        "--moe-router-topk 1",
        when=lambda job: job.model.moe_router_topk == 1 and has_zero_gradient(job),
        why="has no gradient where scores are normalized after the choice",
        fix="add --moe-router-pre-softmax",
    ),
    Rule(
        "--moe-router-enable-expert-bias",
        when=lambda job: (
            job.flags.moe_router_enable_expert_bias
            and job.flags.moe_router_score_function not in ("sigmoid", "sqrtsoftplus")
        ),
        why="is for --moe-router-score-function sigmoid or sqrtsoftplus",
        fix="choose one of these",
    ),
    Rule(
        "--moe-shared-expert-overlap",
        when=lambda job: (
            job.flags.moe_shared_expert_overlap
            and job.model.moe_shared_expert_intermediate_size
            and job.parallel.moe_token_dispatcher_type not in ("alltoall", "flex")
        ),
        why="is for --moe-token-dispatcher-type alltoall or flex",
        fix="choose one of these",
    ),
    Rule(
        "--moe-flex-dispatcher-backend ncclep",
        when=lambda job: (
            job.parallel.moe_flex_dispatcher_backend == "ncclep"
            and job.parallel.moe_token_dispatcher_type != "flex"
        ),
        why="is for --moe-token-dispatcher-type flex",
        fix="choose that",
    ),
    Rule(
        "--moe-enable-deepep",
        when=lambda job: job.flags.moe_enable_deepep and job.parallel.moe_token_dispatcher_type != "flex",
        why="is for --moe-token-dispatcher-type flex",
        fix="choose that",
    ),
    Rule(
        "--moe-pad-expert-input-to-capacity",
        when=lambda job: job.model.moe_pad_expert_input_to_capacity and job.model.expert_capacity is None,
        why="has no capacity",
        fix="add --moe-expert-capacity-factor",
    ),
    Rule(
        "--moe-pad-expert-input-to-capacity",
        when=lambda job: (
            job.model.moe_pad_expert_input_to_capacity
            and job.parallel.moe_token_dispatcher_type == "flex"
            and job.parallel.moe_flex_dispatcher_backend == "deepep"
        ),
        why="is not for --moe-flex-dispatcher-backend deepep",
        fix="choose hybridep, or --moe-token-dispatcher-type alltoall",
    ),
    Rule(
        "--moe-expert-capacity-factor",
        when=lambda job: (
            job.model.moe_expert_capacity_factor is not None
            and "sinkhorn" in str(job.flags.moe_router_load_balancing_type)
        ),
        why="is not for --moe-router-load-balancing-type sinkhorn",
        fix="choose aux_loss, seq_aux_loss, global_aux_loss or none",
    ),
    Rule(
        "--moe-expert-capacity-factor 0",
        when=lambda job: job.model.expert_capacity == 0,
        why="drops every token",
        fix="raise it",
    ),
    Rule(
        "--moe-expert-rank-capacity-factor",
        when=lambda job: (
            job.flags.moe_expert_rank_capacity_factor is not None
            and job.parallel.moe_flex_dispatcher_backend not in ("hybridep", "ncclep")
        ),
        why="is for --moe-flex-dispatcher-backend hybridep or ncclep",
        fix="choose one of these",
    ),
    Rule(
        "--moe-paged-stash",
        when=lambda job: job.precision.moe_paged_stash and job.flags.moe_expert_rank_capacity_factor is None,
        why="keeps as many tokens as --moe-expert-rank-capacity-factor says",
        fix="add that flag",
    ),
    Rule(
        "--moe-single-grouped-weight",
        when=lambda job: (
            job.flags.moe_single_grouped_weight and not job.precision.use_transformer_engine_op_fuser
        ),
        why="needs --moe-grouped-gemm and --use-transformer-engine-op-fuser",
        fix="add both, or leave it out",
    ),
    Rule(
        "--moe-single-grouped-bias",
        when=lambda job: job.flags.moe_single_grouped_bias and not job.model.add_bias_linear,
        why="is for experts with biases",
        fix="leave it out",
    ),
    Rule(
        "--moe-single-grouped-weight or --moe-single-grouped-bias",
        when=lambda job: has_single_group(job) and not job.precision.moe_grouped_gemm,
        why="is for --moe-grouped-gemm",
        fix="add it",
    ),
    Rule(
        "--moe-router-padding-for-quantization",
        when=lambda job: pads_routing(job) and not can_pad_routing(job),
        why="is for --fp8-format and --moe-token-dispatcher-type alltoall or flex",
        fix="leave it out",
    ),
    Rule(
        "--moe-use-upcycling",
        when=lambda job: job.flags.moe_use_upcycling and not job.flags.save,
        why="saves what it makes",
        fix="add --save",
    ),
    # Multi-token prediction.
    Rule(
        "--mtp-num-layers",
        when=lambda job: (
            job.model.mtp_num_layers and job.model.position_embedding_type not in ("rope", "none")
        ),
        why="is for --position-embedding-type rope or none",
        fix="choose one of these",
    ),
)
