"""The keys of whole models, and the keys of a single family; see ``attention_keys.py``."""

from megatron_pp_ext.planner.hugging_face import expert_keys as mlp
from megatron_pp_ext.planner.hugging_face.attention_keys import Arguments
from megatron_pp_ext.planner.hugging_face.config_keys import Keys, unknown_key


def body(keys: Keys) -> Arguments:
    """Return the arguments of all models, besides their layers."""
    return {"num_layers": keys.layers, **_ends(keys)}


def _ends(keys: Keys) -> Arguments:
    return {
        "hidden_size": keys.size("hidden_size"),
        "vocab_size": keys.size("vocab_size"),
        "untie_embeddings_and_output_weights": not keys.truth("tie_word_embeddings"),
        "max_position_embeddings": keys.positions,
        "hidden_dropout": 0.0,
    }


def rms_norm(keys: Keys) -> Arguments:
    """Return norms by the root of the mean square (Zhang and Sennrich, arXiv 1910.07467)."""
    return {"normalization": "RMSNorm", "layernorm_epsilon": keys.number("rms_norm_eps", 1e-6)}


def hybrid_body(keys: Keys) -> Arguments:
    """Return the body of a model whose pattern has its number of layers."""
    keys.number("hidden_dropout", 0.0, below=1)
    for name in ("norm_eps", "rms_norm_eps"):
        keys.skip(name)  # layer_norm_epsilon is what the layers have
    keys.require("attention_bias", False, "a hybrid model has biases in all of its layers, or in none")
    keys.require("mlp_bias", False, "a hybrid model has biases in all of its layers, or in none")
    epsilon = keys.number("layer_norm_epsilon", 1e-5)
    return {**_ends(keys), "normalization": "RMSNorm", "layernorm_epsilon": epsilon}


def layer_norm_1p(keys: Keys) -> Arguments:
    """Return norms whose weights are kept less one."""
    return {
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": True,
        "layernorm_epsilon": keys.number("norm_eps", 1e-5),
    }


def query_biases(keys: Keys) -> Arguments:
    """Return attention whose queries, keys and values have biases unless qkv_bias is false."""
    return {"add_bias_linear": False, "add_qkv_bias": keys.truth("qkv_bias", True)}


def no_biases(keys: Keys) -> Arguments:
    """Return linear layers without biases."""
    for name in ("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias"):
        keys.require(name, False, "this model_type is known without biases")
    return {"add_bias_linear": False}


def optional_query_norm(keys: Keys) -> Arguments:
    """Return whether each head of queries and keys has a norm."""
    return {"qk_layernorm": keys.truth("use_qk_norm")}


def qwen3_alone(keys: Keys) -> Arguments:
    """Check the keys of Qwen2's experts in files of Qwen3-Coder, whose layers are Qwen3's."""
    keys.require("qkv_bias", False, "this model_type is known without biases")
    keys.require("use_qk_norm", True, "this model_type is known with norms of queries and keys")
    keys.require("shared_expert_intermediate_size", 0, "this model_type is known without shared experts")
    return {}


def norm_of_all_heads(keys: Keys) -> Arguments:
    """Return norms of queries and keys, which these models take over all heads at once."""
    keys.require("use_qk_norm", True, "this model_type is known with norms of queries and keys")
    keys.require("qk_norm_type", "per_layer", "this model_type is known with one norm for all heads")
    keys.notes.append("--qk-layernorm takes the norms of queries and keys by head in place of all at once")
    return {"qk_layernorm": True}


def unpublished_prediction(keys: Keys) -> Arguments:
    """Pass over prediction layers whose weights nobody has published, as Megatron-Bridge does."""
    layers = keys.count("num_mtp_modules") if keys.truth("use_mtp") else 0
    keys.skip("mtp_transformer_layers")
    if layers:
        keys.notes.append(
            f"its {layers} prediction layers are not published: --mtp-num-layers {layers} adds them"
        )
    kinds = keys.by_layer("attn_type_list", keys.layers, {0: 0, 1: 1}) or []
    if 0 in kinds:
        raise ValueError(unknown_key("attn_type_list", kinds))
    keys.skip("shared_moe_mode", "mlp_intermediate_size", "use_grouped_topk")
    keys.require("shared_intermediate_size", 0, "this model_type is known without shared experts")
    return {}


def gpt_oss(keys: Keys) -> Arguments:
    """Return the clamped activation of gpt-oss (OpenAI, arXiv 2508.10925)."""
    keys.require("attention_bias", True, "this model_type is known with biases in all layers")
    keys.one_of("hidden_act", ("silu",), "silu")
    keys.require("swiglu_alpha", 1.702, "it is the factor of --quick-geglu")
    return {
        "ffn_hidden_size": keys.size("intermediate_size"),
        "activation_func_clamp_value": keys.number("swiglu_limit", 7.0),
    }


def soft_caps(keys: Keys) -> Arguments:
    """Note the caps of attention scores and logits (Gemma Team, arXiv 2408.00118)."""
    keys.require("use_bidirectional_attention", False, "Megatron's GPT sees earlier tokens alone")
    keys.require("sliding_window_size", keys.get("sliding_window"), "it is sliding_window by its older name")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if keys.number(name, 0.0):
            keys.notes.append(f"{name} is left out, for which Megatron has no flag")
    return {}


def chunked(keys: Keys) -> Arguments:
    """Return Llama 4's attention, whose chunks are whole sequences up to attention_chunk_size tokens."""
    keys.by_layer("layer_types", keys.layers, {"chunked_attention": 1, "full_attention": 0})
    keys.longest = keys.count("attention_chunk_size") or None
    return {"qk_l2_norm": keys.truth("use_qk_norm", True)}


def llama4_experts(keys: Keys) -> Arguments:
    """Return Llama 4's experts: one shared, and one chosen by a sigmoid that scales its input."""
    wide = keys.size("intermediate_size")
    arguments = mlp.experts_as_wide_as_mlps(keys)
    keys.require("num_experts_per_tok", 1, "Megatron scales the input of one expert alone")
    keys.one_of("hidden_act", ("silu",), "silu")
    return {
        **arguments,
        "ffn_hidden_size": keys.size("intermediate_size_mlp"),
        "moe_shared_expert_intermediate_size": wide,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "swiglu": True,
    }


def dropped(keys: Keys) -> Arguments:
    """Return dropout, of which Megatron has one for embeddings and residuals."""
    rate = keys.number("resid_pdrop", 0.0, below=1)
    keys.require("embd_pdrop", rate, "Megatron has one dropout for embeddings and residuals (resid_pdrop)")
    return {"hidden_dropout": rate}


def gpt2(keys: Keys) -> Arguments:
    """Return a model with the names that GPT-2's configuration has."""
    keys.one_of("activation_function", ("gelu", "gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    keys.require("scale_attn_by_inverse_layer_idx", False, "Megatron's flags do not scale by layer")
    keys.skip("n_ctx", "embd_pdrop")
    hidden = keys.size("n_embd")
    return {
        "num_layers": keys.size("n_layer"),
        "hidden_size": hidden,
        "ffn_hidden_size": keys.size("n_inner", 4 * hidden),
        "num_attention_heads": keys.size("n_head"),
        "vocab_size": keys.size("vocab_size"),
        "layernorm_epsilon": keys.number("layer_norm_epsilon", 1e-5),
        "attention_dropout": keys.number("attn_pdrop", 0.1, below=1),
        "hidden_dropout": keys.number("resid_pdrop", 0.1, below=1),
        "untie_embeddings_and_output_weights": not keys.truth("tie_word_embeddings", True),
        "max_position_embeddings": keys.size("n_positions"),
    }
