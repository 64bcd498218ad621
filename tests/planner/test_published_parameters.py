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
    "position_embedding_type": "yarn",
}  # fmt: skip
"""arXiv 2508.10925, table 1, which does not count the embedding among the active ones."""

PUBLISHED = {
    # arXiv 2504.03624, section 2.
    "nemotron-h-56b": Published(NEMOTRON_H_56B, 56, None, 0.5),
    # The technical report of Nemotron 3 Nano, table 1: 31.6B, 3.2B active, 3.6B with embeddings.
    "nemotron-3-nano": Published(NEMOTRON_3_NANO, 31.6, 3.2, 0.05, 0.05),
    "gpt-oss-120b": Published(GPT_OSS_120B, 116.83, 5.13, 0.005, 0.005),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    published = PUBLISHED[name]
    found = parameters(describe(published.sizes))
    assert found.parameters / 1e9 == pytest.approx(published.whole, abs=published.rounding)
    if published.active is not None:
        assert found.active_parameters / 1e9 == pytest.approx(published.active, abs=published.active_rounding)
