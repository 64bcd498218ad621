"""The keys of models whose layers are Mamba, attention, MLPs or experts by a pattern (arXiv 2504.03624)."""

from megatron_pp_ext.planner.hugging_face.attention_keys import Arguments
from megatron_pp_ext.planner.hugging_face.config_keys import BY_FLAGS, Keys
from megatron_pp_ext.planner.hugging_face.expert_keys import COUNTS, experts, shared, sigmoid_router

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
