"""Configurations that NVIDIA recommends for pre-training on H100, in the planner's names.

NEMO is NVIDIA/NeMo, scripts/llm/performance/recommended_model_configs/model_configs_h100.csv, at commit
349c4019dd; BRIDGE is NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/perf_recipes, at commit 2e7ec2afaa.
All are in bf16, with one sequence a microbatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NEMO, BRIDGE = "NeMo", "Megatron-Bridge"

_MIXTRAL_8X22B = {
    "num_layers": 56,
    "hidden_size": 6144,
    "ffn_hidden_size": 16384,
    "moe_ffn_hidden_size": 16384,
    "num_attention_heads": 48,
    "group_query_attention": True,
    "num_query_groups": 8,
    "vocab_size": 32768,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
}
"""mistralai/Mixtral-8x22B-v0.1, config.json."""

DEEPSEEK_V3 = {
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "num_attention_heads": 128,
    "group_query_attention": True,
    "num_query_groups": 8,
    "kv_channels": 128,
    "vocab_size": 129280,
    "num_experts": 256,
    "moe_router_topk": 8,
    "moe_layer_freq": [0] * 3 + [1] * 58,
    "mtp_num_layers": 1,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
}
"""arXiv 2412.19437, section 4.2, but for multi-latent attention, which the planner does not count.  In its
place are as many heads in 8 groups, of 250 million weights a layer for 187."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recommended configuration: ``model`` is a shipped name or a description.

    ``sizes`` are the arguments of its parallelism, its stages and its recomputation.  ``note`` says where it
    is described otherwise than its source has it.
    """

    name: str
    source: str
    model: str | Mapping[str, Any]
    gpus: int
    seq_length: int
    global_batch_size: int
    sizes: Mapping[str, Any]
    note: str = ""


def _sizes(
    tensor: int, pipeline: int, context: int, chunks: int | None, expert: int = 1, **more: Any
) -> Mapping[str, Any]:
    return {
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
        "num_virtual_stages_per_pipeline_rank": chunks,
        "expert_model_parallel_size": expert,
        **more,
    }


RECIPES = (
    Recipe("Llama 3 70B", NEMO, "llama3-70b", 64, 8192, 128, _sizes(4, 4, 2, 5)),
    Recipe("Llama 3.1 405B", NEMO, "llama3-405b", 576, 8192, 252, _sizes(8, 9, 2, 7)),
    Recipe("Mixtral 8x7B", NEMO, "mixtral-8x7b", 64, 4096, 256, _sizes(1, 4, 1, 8, 8)),
    Recipe(
        "Mixtral 8x22B",
        NEMO,
        _MIXTRAL_8X22B,
        256,
        65536,
        256,
        _sizes(4, 4, 8, 14, 8, expert_tensor_parallel_size=1),
    ),
    Recipe(
        "DeepSeek-V3",
        BRIDGE,
        DEEPSEEK_V3,
        1024,
        4096,
        16384,
        _sizes(
            2,
            8,
            1,
            None,
            64,
            expert_tensor_parallel_size=1,
            pipeline_model_parallel_layout="Et|(tt|)*30mL",
            recompute_granularity="selective",
            recompute_modules=["mlp"],
        ),
        note="grouped-query attention in the place of multi-latent attention",
    ),
    Recipe(
        "DeepSeek-V3 in pairs",
        BRIDGE,
        DEEPSEEK_V3 | {"overlap_moe_expert_parallel_comm": True},
        1024,
        4096,
        8192,
        _sizes(
            2,
            8,
            1,
            None,
            64,
            expert_tensor_parallel_size=1,
            pipeline_model_parallel_layout="Et*3|(tt|)*29m|L",
            recompute_granularity="selective",
            recompute_modules=["mlp"],
        ),
        note="the same; its source has it in FP8",
    ),
)
