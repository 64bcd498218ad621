"""How much of today's models' weight gradients the split leaves for W, by the cost model."""

from typing import Any

import pytest

from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step.model_description import describe

SPARSE = {
    "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 64, "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048, "dsa_indexer_loss_coeff": 0.01,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "DeepSeek-V3": ("deepseek-v3", {}, 0.997),
    "Kimi-K2": ("kimi-k2", {}, 0.995),
    "DeepSeek-V3.2": ("deepseek-v3", SPARSE, 0.970),
    "Qwen3-Next": ("qwen3-next-80b", {}, 0.985),
    "gpt-oss-120b": ("gpt-oss-120b", {}, 0.997),
    "gpt-oss-20b": ("gpt-oss-20b", {}, 0.999),
    "Nemotron-H": ("nemotron-h-56b", {}, 1.0),
    "Nemotron-3": ("nemotron-3-nano", {}, 0.997),
}
"""Shipped models, what flags add to them, and the share of their weight gradients that waits for W."""


def share(name: str, more: dict[str, Any]) -> float:
    """Return the share of the operations: two for each weight that a token uses, of which W has those of
    products with a weight in a linear layer."""
    job = describe({**described.read_model(name).values, "micro_batch_size": 1, "bf16": True, **more})
    model = model_parts(job)
    used = sum(model.layers, model.last_norm + model.output)
    chosen = job.model.moe_router_topk / (job.model.num_experts or 1)
    active = used.parameters + chosen * used.expert_parameters
    return used.weight_operations / (2 * job.model.seq_length * active)


@pytest.mark.parametrize("model", MODELS)
def test_nearly_all_of_the_weight_gradients_wait_for_w(model: str) -> None:
    name, more, expected = MODELS[model]
    assert share(name, more) == pytest.approx(expected, abs=0.0005)
