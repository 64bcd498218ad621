"""The keys of attention: heads, latent and sparse attention, gated delta nets, windows and positions.

Each function returns Megatron's arguments for some keys.  The meaning of the keys is that of the model's
configuration class in Transformers, and the arguments are those with which Megatron-Bridge trains the model.
"""

from collections.abc import Mapping
from typing import Any

from megatron_pp_ext.json_input import short
from megatron_pp_ext.planner.hugging_face.config_keys import BY_FLAGS, Keys, frequency

Arguments = dict[str, Any]


def heads(keys: Keys) -> Arguments:
    """Return heads of one size, some of which share keys and values (Ainslie et al., arXiv 2305.13245)."""
    count = keys.size("num_attention_heads")
    groups = keys.size("num_key_value_heads", count)
    if count % groups:
        raise ValueError(
            f"num_key_value_heads is {groups}, but must divide num_attention_heads {count}: correct it"
        )
    return {
        "num_attention_heads": count,
        "kv_channels": _head_size(keys, count),
        "group_query_attention": groups != count,
        "num_query_groups": groups if groups != count else None,
        "attention_dropout": keys.number("attention_dropout", 0.0, below=1),
    }


def _head_size(keys: Keys, count: int) -> int:
    if keys.get("head_dim") is not None or keys.get("attention_head_dim") is not None:
        return keys.size_of("head_dim", "attention_head_dim")
    hidden = keys.size("hidden_size")
    if hidden % count:
        raise ValueError(
            f"hidden_size {hidden} is not divisible by num_attention_heads {count}: change one, or add "
            "head_dim"
        )
    return hidden // count


def biases_of_all(keys: Keys) -> Arguments:
    """Return whether linear layers have biases; ValueError where attention and MLPs differ.

    attention_bias is one of the output's projection too.
    """
    of_attention, of_mlp = keys.truth("attention_bias"), keys.truth("mlp_bias")
    if of_attention != of_mlp:
        name, other = ("attention_bias", "mlp_bias") if of_attention else ("mlp_bias", "attention_bias")
        raise ValueError(
            f"{name} is true and {other} is not, but Megatron has biases of all linear layers, or of "
            f"queries, keys and values alone: {BY_FLAGS}"
        )
    return {"add_bias_linear": of_mlp, "add_qkv_bias": of_mlp}


def biases_of_inputs(keys: Keys) -> Arguments:
    """Return whether queries, keys and values have biases; no other layer has any."""
    return {"add_bias_linear": False, "add_qkv_bias": keys.truth("attention_bias")}


def latent(keys: Keys) -> Arguments:
    """Return multi-latent attention (DeepSeek-AI, arXiv 2405.04434, section 2.1)."""
    for name in ("attention_bias", "mlp_bias"):
        keys.require(name, False, "this model_type is known without biases")
    content, position = keys.size("qk_nope_head_dim"), keys.size("qk_rope_head_dim")
    keys.require("qk_head_dim", content + position, "it is qk_nope_head_dim and qk_rope_head_dim together")
    keys.skip("num_key_value_heads", "head_dim")
    rank = keys.get("q_lora_rank")
    return {
        "multi_latent_attention": True,
        "num_attention_heads": keys.size("num_attention_heads"),
        "q_lora_rank": None if rank is None else keys.size("q_lora_rank"),
        "kv_lora_rank": keys.size("kv_lora_rank"),
        "qk_head_dim": content,
        "qk_pos_emb_head_dim": position,
        "v_head_dim": (values := keys.size("v_head_dim")),
        "kv_channels": values,
        "qk_layernorm": True,
        "attention_dropout": keys.number("attention_dropout", 0.0, below=1),
        "add_bias_linear": False,
        **_latent_positions(keys),
    }


def sparse(keys: Keys) -> Arguments:
    """Return DeepSeek's sparse attention, whose indexer selects tokens (DeepSeek-V3.2, arXiv 2512.02556)."""
    keys.by_layer("layer_types", keys.layers, {"indexed_attention": 1})
    arguments: Arguments = {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": keys.size("index_n_heads"),
        "dsa_indexer_head_dim": keys.size("index_head_dim"),
        "dsa_indexer_topk": keys.size("index_topk"),
    }
    period, first = keys.size("index_topk_freq", 1), keys.count("index_skip_topk_offset")
    pattern = keys.by_layer("index_topk_pattern", keys.layers, {"F": 1, "S": 0})
    choosing = keys.by_layer("indexer_types", keys.layers, {"full": 1, "shared": 0}) or pattern or []
    if 0 in choosing:
        period, first = _sharing(choosing, "index_topk_pattern" if choosing is pattern else "indexer_types")
    if period > 1:
        arguments |= {"dsa_indexer_topk_freq": period, "dsa_indexer_skip_topk_offset": first}
    return arguments


def _sharing(choosing: list[int], name: str) -> tuple[int, int]:
    """Return how many layers share a choice of tokens, and how many before them choose by themselves.

    ``choosing``, the value of the key ``name``, has a 1 for each layer with an indexer.
    """
    first = choosing.index(0)
    period = [*choosing, 1].index(1, first) - first + 1
    alone = max(1, first)
    if choosing != [int(max(0, number - alone) % period == 0) for number in range(1, len(choosing) + 1)]:
        raise ValueError(f"{name} has no period, and Megatron's layers share with one: {BY_FLAGS}")
    return period, first


def gated_delta_net(keys: Keys) -> Arguments:
    """Return layers of gated delta nets between layers of gated attention (Yang et al., arXiv 2412.06464)."""
    kinds = keys.by_layer("layer_types", keys.layers, {"linear_attention": 1, "full_attention": 0})
    interval = keys.size("full_attention_interval", 4)
    keys.require("attn_output_gate", True, "the output of full attention is gated in this family")
    keys.one_of("output_gate_type", ("sigmoid", "swish", "silu"), "sigmoid")  # of the same cost
    keys.require("use_sliding_window", False, "this model_type is known without windows")
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": interval if kinds is None else frequency(kinds, marked=0),
        "linear_conv_kernel_dim": keys.size("linear_conv_kernel_dim"),
        "linear_key_head_dim": keys.size("linear_key_head_dim"),
        "linear_value_head_dim": keys.size("linear_value_head_dim"),
        "linear_num_key_heads": keys.size("linear_num_key_heads"),
        "linear_num_value_heads": keys.size("linear_num_value_heads"),
        "attention_output_gate": True,
    }


def windows(keys: Keys) -> Arguments:
    """Return the sliding window of all layers, or of some; no arguments without a window.

    A token sees itself and sliding_window - 1 tokens before it.
    """
    layers, window = keys.layers, keys.count("sliding_window")
    sliding = keys.by_layer("layer_types", layers, {"sliding_attention": 1, "full_attention": 0})
    period = keys.count("sliding_window_pattern", keys.count("_sliding_window_pattern"))
    first = keys.count("max_window_layers")
    if not keys.truth("use_sliding_window", True):
        return {}
    if sliding is None and period:
        sliding = [int(number % period != 0) for number in range(1, layers + 1)]
    if sliding is None:
        sliding = [int(window > 0 and number >= first) for number in range(layers)]
    if not any(sliding):
        return {}
    if not window:
        raise ValueError("sliding_window is missing, and some layers have one: add it")
    size = {"window_size": f"{window - 1},0"}
    return size if all(sliding) else {**size, "window_attn_skip_freq": frequency(sliding, marked=0)}


def rotary(keys: Keys) -> Arguments:
    """Return rotary positions, and how they are scaled (YaRN: Peng et al., arXiv 2309.00071)."""
    scaling, how = _scaling(keys)
    arguments = {**_base(keys, scaling), "position_embedding_type": "rope"}
    if how == "llama3":
        arguments |= {"use_rope_scaling": True, "rope_scaling_factor": scaling.number("factor", 8.0)}
    elif how == "linear":
        arguments |= {"rotary_seq_len_interpolation_factor": int(scaling.number("factor", 1.0))}
    elif how == "yarn":
        arguments |= {
            "position_embedding_type": "yarn",
            "rotary_scaling_factor": scaling.number("factor", 1.0),
            "yarn_original_max_position_embeddings": scaling.size(
                "original_max_position_embeddings", keys.positions
            ),
            "yarn_beta_fast": scaling.number("beta_fast", 32.0),
            "yarn_beta_slow": scaling.number("beta_slow", 1.0),
            "yarn_correction_range_round_to_int": scaling.truth("truncate", True),
        }
    return arguments


def _latent_positions(keys: Keys) -> Arguments:
    scaling, how = _scaling(keys)
    keys.skip("partial_rotary_factor")  # qk_rope_head_dim is the part with positions
    if how not in ("default", "yarn"):
        raise ValueError(f"rope_scaling {how!r} is not supported with latent attention: {_NO_COST}")
    base = {"position_embedding_type": "rope", "rotary_base": int(_theta(keys, scaling))}
    if how == "default":
        # Megatron fuses the rotation in latent attention for YaRN alone, and else stops.
        return {**base, "rope_type": "rope", "apply_rope_fusion": False}
    return {
        **base,
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.number("factor", 1.0),
        "mscale": scaling.number("mscale", 1.0),
        "mscale_all_dim": scaling.number("mscale_all_dim", 0.0),
    }


def positions_left_out(keys: Keys) -> Arguments:
    """Return the layers without rotary positions, where some have none."""
    rotated = (
        keys.by_layer("no_rope_layers", keys.layers, {0: 0, 1: 1}) if keys.get("no_rope_layers") else None
    )
    interval = keys.count("no_rope_layer_interval")
    if rotated is None and interval:
        rotated = [int(number % interval != 0) for number in range(1, keys.layers + 1)]
    if rotated is None or all(rotated):
        return {}
    pattern = frequency([1 - mark for mark in rotated], marked=1)
    if isinstance(pattern, int) and keys.layers % pattern:
        pattern = [1 - mark for mark in rotated]  # Megatron repeats a number a whole number of times
    return {"no_rope_freq": pattern}


_NO_COST = "no cost depends on it, so take it out of a copy of the file"


def _scaling(keys: Keys) -> tuple[Keys, str]:
    """Return the parameters of rotary positions, and the name of how they are scaled."""
    outer = keys.mapping("rope_parameters") or keys.mapping("rope_scaling")
    keys.skip("rope_parameters", "rope_scaling")
    by_kind = outer.get("full_attention")
    parameters = by_kind if isinstance(by_kind, Mapping) else outer
    how = parameters.get("rope_type", parameters.get("type", "default"))
    if how in ("mrope", "proportional"):
        how = "default"  # for a text alone
    if how not in ("default", "llama3", "linear", "yarn"):
        raise ValueError(
            f"rope_scaling {short(how)} is not supported, since Megatron's GPT has llama3, linear and yarn "
            f"alone: {_NO_COST}"
        )
    return Keys(parameters, {}), str(how)


def _theta(keys: Keys, scaling: Keys) -> float:
    return scaling.number("rope_theta", keys.number("rope_theta", 10000.0))


def _base(keys: Keys, scaling: Keys) -> Arguments:
    part = scaling.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if keys.get("rotary_dim") is not None:
        part = keys.size("rotary_dim") / _head_size(keys, keys.size("num_attention_heads"))
    if not 0 < part <= 1:
        raise ValueError(f"partial_rotary_factor is {part:g}, but must be above 0 and at most 1: correct it")
    share = {} if part == 1 else {"rotary_percent": part}
    return {"rotary_base": int(_theta(keys, scaling)), **share}
