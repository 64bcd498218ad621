"""Numbers of parameters, all and those that a token uses, against what the models' authors published."""

from typing import Any, NamedTuple

import pytest

from megatron_pp_ext.planner.step.model_description import describe
from megatron_pp_ext.planner.step.parameters import parameters


class Published(NamedTuple):
    """Billions of parameters as published, and by how much the last digit of these may be rounded."""

    sizes: dict[str, Any]
    whole: float
    active: float | None
    rounding: float
    active_rounding: float = 0.0


UNBIASED = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "none",
    "make_vocab_size_divisible_by": 1,
    "seq_length": 8192,
    "bf16": True,
}

NEMOTRON_H_56B = {
    **UNBIASED, "hidden_size": 8192, "ffn_hidden_size": 32768, "num_attention_heads": 64, "kv_channels": 128,
    "group_query_attention": True, "num_query_groups": 8, "squared_relu": True, "vocab_size": 131072,
    "mamba_num_heads": 256, "mamba_head_dim": 64, "mamba_state_dim": 256, "mamba_num_groups": 8,
    "hybrid_layer_pattern": "M-M-M-M*-" + 9 * "M-M-M-M-M*-" + "M-M-M-M-M-",
}  # fmt: skip
"""arXiv 2504.03624, table 2; 118 layers."""

NEMOTRON_3_NANO = {
    **UNBIASED, "hidden_size": 2688, "num_attention_heads": 32, "kv_channels": 128,
    "group_query_attention": True, "num_query_groups": 2, "squared_relu": True, "vocab_size": 131072,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "mamba_state_dim": 128, "mamba_num_groups": 8,
    "num_experts": 128, "moe_router_topk": 6, "moe_ffn_hidden_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "hybrid_layer_pattern": "MEMEM*E" + 4 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME",
}  # fmt: skip
"""The model's config; 52 layers."""

GPT_OSS_120B = {
    **UNBIASED, "num_layers": 36, "hidden_size": 2880, "num_attention_heads": 64, "kv_channels": 64,
    "group_query_attention": True, "num_query_groups": 8, "add_bias_linear": True, "quick_geglu": True,
    "num_experts": 128, "moe_router_topk": 4, "moe_ffn_hidden_size": 2880, "vocab_size": 201088,
    "position_embedding_type": "yarn", "softmax_type": "learnable", "window_size": "127,0",
    "window_attn_skip_freq": 2,
}  # fmt: skip
"""arXiv 2508.10925, table 1, which does not count the embedding among the active ones."""

LATENT = {
    **UNBIASED, "multi_latent_attention": True, "kv_lora_rank": 512, "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "qk_layernorm": True, "swiglu": True,
}  # fmt: skip

DEEPSEEK_V3 = {
    **LATENT, "num_layers": 61, "hidden_size": 7168, "ffn_hidden_size": 18432, "num_attention_heads": 128,
    "q_lora_rank": 1536, "num_experts": 256, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048, "moe_layer_freq": 3 * [0] + 58 * [1], "vocab_size": 129280,
}  # fmt: skip
"""arXiv 2412.19437, section 4.2."""

KIMI_K2 = {
    **DEEPSEEK_V3, "num_attention_heads": 64, "num_experts": 384, "moe_layer_freq": [0] + 60 * [1],
    "vocab_size": 163840,
}  # fmt: skip
"""arXiv 2507.20534, table 2."""

DEEPSEEK_V2_LITE = {
    **LATENT, "num_layers": 27, "hidden_size": 2048, "ffn_hidden_size": 10944, "num_attention_heads": 16,
    "num_experts": 64, "moe_router_topk": 6, "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 2816, "moe_layer_freq": [0] + 26 * [1], "vocab_size": 102400,
}  # fmt: skip
"""arXiv 2405.04434, appendix B."""

GLM_4_5 = {
    **UNBIASED, "num_layers": 92, "hidden_size": 5120, "ffn_hidden_size": 12288, "num_attention_heads": 96,
    "kv_channels": 128, "group_query_attention": True, "num_query_groups": 8, "add_qkv_bias": True,
    "qk_layernorm": True, "swiglu": True, "num_experts": 160, "moe_router_topk": 8,
    "moe_ffn_hidden_size": 1536, "moe_shared_expert_intermediate_size": 1536,
    "moe_layer_freq": 3 * [0] + 89 * [1], "vocab_size": 151552, "mtp_num_layers": 1,
}  # fmt: skip
"""arXiv 2508.06471, table 1, which counts multi-token prediction, but neither embedding nor output layer."""
GLM_4_5_ENDS = 2 * 151552 * 5120 / 1e9

MINIMAX_M2 = {
    **UNBIASED, "num_layers": 62, "hidden_size": 3072, "num_attention_heads": 48, "kv_channels": 128,
    "group_query_attention": True, "num_query_groups": 8, "qk_layernorm": True, "swiglu": True,
    "num_experts": 256, "moe_router_topk": 8, "moe_ffn_hidden_size": 1536, "vocab_size": 200064,
}  # fmt: skip
"""The model's config."""

GEMMA_2_9B = {
    **UNBIASED, "num_layers": 42, "hidden_size": 3584, "ffn_hidden_size": 14336, "num_attention_heads": 16,
    "kv_channels": 256, "group_query_attention": True, "num_query_groups": 8, "swiglu": True,
    "vocab_size": 256000, "untie_embeddings_and_output_weights": False, "window_size": "4095,0",
    "window_attn_skip_freq": 2,
}  # fmt: skip
"""arXiv 2408.00118, table 1."""

QWEN3_NEXT = {
    **UNBIASED, "num_layers": 48, "hidden_size": 2048, "num_attention_heads": 16, "kv_channels": 256,
    "group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True, "swiglu": True,
    "attention_output_gate": True, "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4, "num_experts": 512, "moe_router_topk": 10, "moe_ffn_hidden_size": 512,
    "moe_shared_expert_intermediate_size": 512, "moe_shared_expert_gate": True, "vocab_size": 151936,
}  # fmt: skip
"""The model's config."""

PUBLISHED = {
    # arXiv 2504.03624, section 2.
    "nemotron-h-56b": Published(NEMOTRON_H_56B, 56, None, 0.5),
    # The technical report of Nemotron 3 Nano, table 1: 31.6B, 3.2B active, 3.6B with embeddings.
    "nemotron-3-nano": Published(NEMOTRON_3_NANO, 31.6, 3.2, 0.05, 0.05),
    "gpt-oss-120b": Published(GPT_OSS_120B, 116.83, 5.13, 0.005, 0.005),
    "gpt-oss-20b": Published(
        {**GPT_OSS_120B, "num_layers": 24, "num_experts": 32}, 20.91, 3.61, 0.005, 0.005
    ),
    "deepseek-v3": Published(DEEPSEEK_V3, 671, 37, 0.5, 0.5),
    "deepseek-v2-lite": Published(DEEPSEEK_V2_LITE, 15.7, 2.4, 0.05, 0.06),
    # Its sizes make 1.03 trillions, as its files have; the report says 1.04.
    "kimi-k2": Published(KIMI_K2, 1040, None, 15),
    "glm-4.5": Published(GLM_4_5, 355 + GLM_4_5_ENDS, None, 0.5),
    # The model card has tens of billions.
    "minimax-m2": Published(MINIMAX_M2, 230, 10, 5, 0.5),
    "gemma-2-9b": Published(GEMMA_2_9B, 9.24, None, 0.005),
    "qwen3-next-80b": Published(QWEN3_NEXT, 80, None, 0.5),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    published = PUBLISHED[name]
    found = parameters(describe(published.sizes))
    assert found.parameters / 1e9 == pytest.approx(published.whole, abs=published.rounding)
    if published.active is not None:
        assert found.active_parameters / 1e9 == pytest.approx(published.active, abs=published.active_rounding)
