"""How much of today's models' weight gradients the split leaves for W, by the cost model."""

from pathlib import Path
from typing import Any

import pytest

from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.planner import model_names
from megatron_pp_ext.planner.step.model_description import describe

DOCUMENT = Path(__file__).parents[2] / "docs/compatibility.md"
SPARSE = {
    "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 64, "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048, "dsa_indexer_loss_coeff": 0.01,
}  # fmt: skip
MODELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "DeepSeek-V3, Kimi-K2": (("deepseek-v3", "kimi-k2"), {}),
    "DeepSeek-V3.2": (("deepseek-v3",), SPARSE),
    "Qwen3-Next": (("qwen3-next-80b",), {}),
    "gpt-oss": (("gpt-oss-120b", "gpt-oss-20b"), {}),
    "Nemotron-H": (("nemotron-h-56b",), {}),
    "Nemotron-3": (("nemotron-3-nano",), {}),
}
"""The shipped models of each row of the document's table of models, and what their flags say more."""


def share(name: str, more: dict[str, Any]) -> float:
    """Return the share of the operations: two for each weight that a token uses, of which W has those of
    products with a weight in a linear layer."""
    job = describe({**model_names.read(name).values, "micro_batch_size": 1, "bf16": True, **more})
    model = model_parts(job)
    used = sum(model.layers, model.last_norm + model.output)
    chosen = job.model.moe_router_topk / (job.model.num_experts or 1)
    active = used.parameters + chosen * used.expert_parameters
    return used.weight_operations / (2 * job.model.seq_length * active)


@pytest.mark.parametrize("row", MODELS)
def test_the_table_says_what_waits_for_w(row: str) -> None:
    cells = {
        cell[1].strip(): cell[-2].strip()
        for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
        if len(cell := line.split("|")) == 6
    }
    names, more = MODELS[row]
    assert cells[row] == ", ".join(f"{share(name, more):.1%}" for name in names)
