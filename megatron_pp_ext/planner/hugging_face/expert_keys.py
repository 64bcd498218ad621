"""The keys of MLPs, experts, multi-token prediction and layers by a pattern (arXiv 2504.03624)."""

from megatron_pp_ext.planner.hugging_face.attention_keys import Arguments
from megatron_pp_ext.planner.hugging_face.config_keys import BY_FLAGS, Keys

COUNTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
CHOSEN = "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k"


def gated(keys: Keys) -> Arguments:
    """Return MLPs gated by SiLU (Shazeer, arXiv 2002.05202)."""
    keys.one_of("hidden_act", ("silu", "swish"), "silu")
    return {"ffn_hidden_size": keys.size("intermediate_size"), "swiglu": True}


def gated_by_gelu(keys: Keys) -> Arguments:
    """Return MLPs gated by GELU, for which Megatron's flags have an approximation alone."""
    for name in ("hidden_act", "hidden_activation"):
        keys.one_of(name, ("gelu_pytorch_tanh", "gelu"), "gelu_pytorch_tanh")
    keys.notes.append("--quick-geglu stands for its gated GELU")
    return {"ffn_hidden_size": keys.size("intermediate_size"), "quick_geglu": True}


def squared_relu(keys: Keys) -> Arguments:
    """Return MLPs with squared ReLU and no gate (So et al., arXiv 2109.08668)."""
    name = "mlp_hidden_act" if keys.get("mlp_hidden_act") is not None else "hidden_act"
    keys.one_of(name, ("relu2",), "relu2")
    return {"ffn_hidden_size": keys.size("intermediate_size"), "squared_relu": True}


def gated_experts_alone(keys: Keys) -> Arguments:
    """Return the MLPs of a model all of whose layers have experts instead."""
    keys.one_of("hidden_act", ("silu",), "silu")
    keys.skip("intermediate_size")
    return {"ffn_hidden_size": keys.size("moe_intermediate_size"), "swiglu": True}


def experts(keys: Keys, width: str = "moe_intermediate_size") -> Arguments:
    """Return the experts of a layer, ``width`` wide, and how many of them a token is sent to."""
    count, top_k = keys.size_of(*COUNTS), keys.size_of(*CHOSEN)
    if top_k > count:
        raise ValueError(f"{top_k} experts a token are more than the {count} that there are: correct either")
    return {
        "num_experts": count,
        "moe_router_topk": top_k,
        "moe_ffn_hidden_size": keys.size(width),
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def experts_as_wide_as_mlps(keys: Keys) -> Arguments:
    """Return the experts of a model whose only width of MLPs is theirs."""
    return experts(keys, "intermediate_size")


def expert_layers(keys: Keys) -> Arguments:
    """Return which layers have experts, where some have none, by the keys of any family."""
    layers = keys.layers
    has = keys.by_layer("mlp_layer_types", layers, {"dense": 0, "sparse": 1})
    dense, step = keys.count("first_k_dense_replace"), keys.size("moe_layer_freq", 1)
    period, without = keys.size("decoder_sparse_step", 1), keys.numbers("mlp_only_layers")
    numbers, interleaved = keys.numbers("moe_layers"), keys.size("interleave_moe_layer_step", 1)
    if has is None and numbers:
        has = [int(number in numbers) for number in range(layers)]
    if has is None:
        has = [
            int(
                number >= dense
                and number % step == 0
                and (number + 1) % period == 0
                and (number + 1) % interleaved == 0
                and number not in without
            )
            for number in range(layers)
        ]
    return {} if all(has) else {"moe_layer_freq": has}


def softmax_router(keys: Keys) -> Arguments:
    """Return a router that takes the softmax of all experts, or of the chosen ones."""
    # Megatron's router normalises the chosen experts' weights unless it takes the softmax before.
    return {"moe_router_pre_softmax": not keys.truth("norm_topk_prob"), **_balanced("aux_loss")}


def grouped_router(keys: Keys) -> Arguments:
    """Return the router of DeepSeek-V2, which may choose groups of experts first (arXiv 2405.04434)."""
    keys.one_of("scoring_func", ("softmax",), "softmax")
    keys.one_of("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    keys.truth("norm_topk_prob")
    return {"moe_router_pre_softmax": True, **_groups(keys), **_balanced("seq_aux_loss")}


def sigmoid_router(keys: Keys) -> Arguments:
    """Return the router of DeepSeek-V3, balanced by biases (arXiv 2412.19437, section 2.1.2)."""
    keys.one_of("scoring_func", ("sigmoid",), "sigmoid")
    keys.one_of("topk_method", ("noaux_tc",), "noaux_tc")
    keys.truth("norm_topk_prob", True)
    keys.truth("use_routing_bias", True)
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        **_groups(keys),
        **_balanced("seq_aux_loss"),
    }


def _groups(keys: Keys) -> Arguments:
    groups, top_k = keys.size("n_group", 1), keys.size("topk_group", 1)
    scale = keys.number("routed_scaling_factor", 1.0)
    arguments: Arguments = {} if scale == 1 else {"moe_router_topk_scaling_factor": scale}
    return (
        arguments
        if groups == 1
        else {**arguments, "moe_router_num_groups": groups, "moe_router_group_topk": top_k}
    )


def _balanced(how: str) -> Arguments:
    return {"moe_router_load_balancing_type": [how]}


def shared(keys: Keys) -> Arguments:
    """Return the experts that all tokens go to, as one (Dai et al., arXiv 2401.06066)."""
    size = keys.count("moe_shared_expert_intermediate_size") or keys.count("moe_intermediate_size")
    count = keys.count("n_shared_experts")
    return {"moe_shared_expert_intermediate_size": count * size} if count else {}


def gated_shared(keys: Keys) -> Arguments:
    """Return the expert that all tokens go to, whose output is gated."""
    return {
        "moe_shared_expert_intermediate_size": keys.size("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


def prediction(keys: Keys) -> Arguments:
    """Return the layers that predict further tokens (DeepSeek-AI, arXiv 2412.19437, section 2.2)."""
    keys.require("mtp_use_dedicated_embeddings", False, "Megatron's share the embedding of the model")
    depth = keys.count("num_nextn_predict_layers") or keys.count("mtp_num_hidden_layers")
    return {"mtp_num_layers": depth} if depth else {}


_LETTERS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
"""Megatron's letters of the kinds of layers."""

_STACK = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]


def hybrid_layers(keys: Keys) -> Arguments:
    """Return the pattern of the layers, followed by the MTP layers."""
    pattern = _pattern(keys, "hybrid_override_pattern", "layers_block_type")
    if pattern is None:
        raise ValueError("hybrid_override_pattern is missing: add it")
    count = keys.size("num_hidden_layers", len(pattern))
    if count != len(pattern):
        raise ValueError(
            f"num_hidden_layers is {count}, but the pattern has {len(pattern)} layers: correct either"
        )
    depth = keys.count("num_nextn_predict_layers")
    predicting = _pattern(keys, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    if depth and predicting is None:
        raise ValueError(
            "mtp_hybrid_override_pattern is missing, and num_nextn_predict_layers is not: add it"
        )
    keys.require("conv_kernel", 4, "Megatron's Mamba layers see four tokens in their convolution")
    keys.require("use_conv_bias", True, "Megatron's Mamba layers have this bias")
    keys.require("mamba_proj_bias", False, "Megatron's Mamba layers have no such bias")
    keys.require("mamba_hidden_act", "silu", "Megatron's Mamba layers have this activation")
    keys.skip("expand", "chunk_size")
    arguments: Arguments = {
        "hybrid_layer_pattern": "/".join([pattern, *[predicting or ""] * depth]),
        "spec": _STACK,
        "mamba_num_heads": keys.size("mamba_num_heads"),
        "mamba_head_dim": keys.size("mamba_head_dim"),
        "mamba_num_groups": keys.size("n_groups"),
        "mamba_state_dim": keys.size("ssm_state_size"),
        "position_embedding_type": "none",
        "add_bias_linear": keys.truth("use_bias"),
    }
    if depth:
        # The published models predict all further tokens by the same weights.
        repeats = keys.truth("mtp_use_repeated_layer", True)
        arguments |= {"mtp_num_layers": depth, "mtp_use_repeated_layer": repeats}
    keys.skip("keep_mtp_spec_in_bf16", "rope_theta", "partial_rotary_factor", "sliding_window")
    if keys.truth("residual_in_fp32"):
        arguments["fp32_residual_connection"] = True
    return arguments


def _pattern(keys: Keys, text: str, kinds: str) -> str | None:
    """Return a letter a layer, which the key ``text`` has as such, or ``kinds`` as a list of names."""
    pattern, kind_names = keys.get(text), keys.get(kinds)
    if pattern is None and kind_names is not None:
        pattern = (
            "".join(_LETTERS.get(str(kind), "?") for kind in kind_names)
            if isinstance(kind_names, list)
            else "?"
        )
    if pattern is None:
        return None
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_LETTERS.values()):
        letters = ", ".join(f"{letter} ({name})" for name, letter in _LETTERS.items())
        raise ValueError(f"{text} is {pattern!r}, but must have {letters} alone: correct it, or {BY_FLAGS}")
    return pattern


def hybrid_experts(keys: Keys) -> Arguments:
    """Return the experts of E layers, which may work in a smaller latent space (arXiv 2601.18089)."""
    pattern = _pattern(keys, "hybrid_override_pattern", "layers_block_type") or ""
    predicting = _pattern(keys, "mtp_hybrid_override_pattern", "mtp_layers_block_type") or ""
    if "E" not in pattern + predicting:
        keys.skip(*COUNTS, "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size")
        keys.skip("num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
        keys.skip("moe_latent_size")
        return {}
    latent = keys.count("moe_latent_size")
    return {
        **experts(keys),
        **sigmoid_router(keys),
        **shared(keys),
        **({"moe_latent_size": latent} if latent else {}),
    }
