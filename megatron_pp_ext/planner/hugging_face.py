"""Megatron's arguments for a model that a Hugging Face ``config.json`` describes.

Supported are the types of ``_FAMILIES``.  What Megatron's flags cannot express, and what the planner does not
count, is refused with the reason.  Weights are not read.
"""

from collections.abc import Mapping
from typing import Any

from megatron_pp_ext.json_input import did_you_mean, is_number, short

LONGEST_DEFAULT = 8192
"""The sequence length where nobody gives one: that of the model's positions, but at most so many tokens."""

_LLAMA = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"}
_FAMILIES = {*_LLAMA, "gpt2"}

_REFUSED = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3", "longcat_flash"),
        "it has multi-latent attention, whose compressed keys the planner does not count",
    ),
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma3_text", "gpt_oss", "cohere2"),
        "its layers alternate between whole and sliding-window attention, which the planner does not count",
    ),
    **dict.fromkeys(
        ("mamba", "mamba2", "jamba", "bamba", "zamba2", "nemotron_h", "qwen3_next"),
        "it has layers that are no transformer layers: give Megatron's --hybrid-layer-pattern and its other "
        "flags in place of --model",
    ),
    **dict.fromkeys(("t5", "bert", "roberta", "bart", "whisper"), "it is no decoder-only model"),
}

_BY_FLAGS = "give Megatron's flags behind -- in place of --model"

_NAMES = {"model_type", "architectures", "transformers_version", "num_hidden_layers", "n_layer"}
"""Names of which every config.json has some, and which none of Megatron's arguments has."""


def is_config(content: Mapping[str, Any]) -> bool:
    """Whether ``content`` is that of a config.json, and not an object of Megatron's arguments."""
    return not _NAMES.isdisjoint(content)


def arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config``, the content of a config.json, as Megatron's arguments by name.

    ValueError for types and features that are not supported, and for what is missing.
    """
    kind = config.get("model_type")
    if kind is None:
        raise ValueError(f"model_type is missing: add it, one of {', '.join(sorted(_FAMILIES))}")
    if isinstance(kind, str) and kind in _REFUSED:
        raise ValueError(f"model_type {kind!r} is not supported: {_REFUSED[kind]}")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        listed = ", ".join(sorted(_FAMILIES))
        hint = did_you_mean(kind, _FAMILIES) if isinstance(kind, str) else ""
        raise ValueError(f"model_type {short(kind)} is not supported, only {listed}: {hint or _BY_FLAGS}")
    return _gpt2(config) if kind == "gpt2" else _llama(config, str(kind))


def _common(length: int) -> dict[str, Any]:
    return {
        "max_position_embeddings": length,
        "seq_length": min(length, LONGEST_DEFAULT),
        "tokenizer_type": "NullTokenizer",
        "bf16": True,
    }


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    _require(config, "activation_function", ("gelu", "gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    _require(config, "scale_attn_by_inverse_layer_idx", (False,), False)
    return {
        "num_layers": _size(config, "n_layer"),
        "hidden_size": _size(config, "n_embd"),
        "ffn_hidden_size": _size(config, "n_inner", 4 * _size(config, "n_embd")),
        "num_attention_heads": _size(config, "n_head"),
        "vocab_size": _size(config, "vocab_size"),
        "layernorm_epsilon": _number(config, "layer_norm_epsilon", 1e-5),
        "attention_dropout": _number(config, "attn_pdrop", 0.1),
        "hidden_dropout": _number(config, "resid_pdrop", 0.1),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
        **_common(_size(config, "n_positions")),
    }


def _llama(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the arguments of a model with RMSNorm, rotary positions and gated MLPs or experts."""
    _require(config, "hidden_act", ("silu",), "silu")
    for bias in ("attention_bias", "mlp_bias", "use_qkv_bias"):
        _require(config, bias, (False,), False)
    heads = _size(config, "num_attention_heads")
    groups = _size(config, "num_key_value_heads", heads)
    found: dict[str, Any] = {
        "num_layers": _size(config, "num_hidden_layers"),
        "hidden_size": _size(config, "hidden_size"),
        "ffn_hidden_size": _size(config, "intermediate_size"),
        "num_attention_heads": heads,
        "kv_channels": _size(config, "head_dim", _size(config, "hidden_size") // heads),
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "vocab_size": _size(config, "vocab_size"),
        "swiglu": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": _number(config, "rms_norm_eps", 1e-6),
        "add_bias_linear": False,
        "add_qkv_bias": kind == "qwen2",
        "qk_layernorm": kind.startswith("qwen3"),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "attention_dropout": _number(config, "attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "position_embedding_type": "rope",
        **_positions(config),
        **_common(_size(config, "max_position_embeddings")),
    }
    if kind in ("mixtral", "qwen3_moe"):
        found |= _experts(config, kind)
    window = sliding_window(config)
    if window is not None:
        found["seq_length"] = min(found["seq_length"], window)
    return found


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Return the tokens that attention sees; None if it sees all of them.

    In a sequence that is no longer than the window, attention sees all tokens in either case.
    """
    uses_it = config.get("use_sliding_window", not str(config.get("model_type")).startswith("qwen"))
    if config.get("sliding_window") is None or not uses_it:
        return None
    return _size(config, "sliding_window")


def _experts(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    count = _size(config, "num_local_experts" if kind == "mixtral" else "num_experts")
    inner = _size(config, "intermediate_size" if kind == "mixtral" else "moe_intermediate_size")
    _require(config, "decoder_sparse_step", (1,), 1)
    _require(config, "mlp_only_layers", ([],), [])
    return {
        "num_experts": count,
        "moe_router_topk": _size(config, "num_experts_per_tok"),
        "moe_ffn_hidden_size": inner,
        "moe_token_dispatcher_type": "alltoall",
        # Megatron's router normalises the chosen experts' weights unless it takes the softmax before.
        "moe_router_pre_softmax": kind == "qwen3_moe" and not config.get("norm_topk_prob", False),
    }


def _positions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base of the rotary positions and their scaling, which no cost depends on."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_scaling is {short(given)}, but must be an object: correct it")
    how = given.get("rope_type", given.get("type", "default"))
    base = _number({**config, **given}, "rope_theta", 10000.0)
    found: dict[str, Any] = {"rotary_base": int(base)}
    if how == "llama3":
        return {**found, "use_rope_scaling": True, "rope_scaling_factor": _number(given, "factor", 8.0)}
    if how != "default":
        raise ValueError(
            f"rope_scaling {how!r} is not supported, since Megatron's GPT has llama3 alone: no cost depends "
            "on it, so take it out of a copy of the file"
        )
    return found


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{name} is missing: add it")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {short(value)}, but must be a whole number of 1 or more: correct it")
    return value


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if not is_number(value) or value < 0:
        raise ValueError(f"{name} is {short(value)}, but must be a finite number of 0 or more: correct it")
    return float(value)


def _require(config: Mapping[str, Any], name: str, known: tuple[Any, ...], default: Any) -> None:
    value = config.get(name)
    value = default if value is None else value
    if value not in known:
        listed = " or ".join(map(short, known))
        raise ValueError(f"{name} is {short(value)}, but only {listed} is supported: {_BY_FLAGS}")
