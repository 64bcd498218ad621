"""Transformer Engine's layers under split schedules: stock's gradients, bit for bit."""

import sys

import pytest

if not hasattr(sys.modules.get("transformer_engine_torch"), "__getattr__"):
    pytest.skip(
        "runs by itself (pytest tests/engine), and TRANSFORMER_ENGINE has to name a checkout",
        allow_module_level=True,
    )

from megatron_pp_ext import cpu
from megatron_pp_ext.megatron.core.engine_linear import DeferringStore
from tests.support import comparison, training

ENGINE = "--pipeline-model-parallel-size 2 --transformer-impl transformer_engine"
EXPERTS = (
    f"{ENGINE} --untie-embeddings-and-output-weights --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
)
SEPARATE, FUSED = "--no-gradient-accumulation-fusion", ""
CASES = {
    "separate": (2, f"{ENGINE} --untie-embeddings-and-output-weights", SEPARATE),
    "fused": (2, f"{ENGINE} --untie-embeddings-and-output-weights", FUSED),
    "tied": (2, ENGINE, FUSED),
    "grouped experts": (2, EXPERTS, SEPARATE),
    "grouped experts, fused": (2, EXPERTS, FUSED),
    "sequence parallel": (4, f"{ENGINE} --tensor-model-parallel-size 2 --sequence-parallel", FUSED),
    "overlapped reduction": (4, f"{ENGINE} --overlap-grad-reduce --use-distributed-optimizer", FUSED),
    "reduction as it comes": (4, f"{ENGINE} --overlap-grad-reduce --no-align-grad-reduce", SEPARATE),
    "bf16": (2, f"{ENGINE} --bf16", FUSED),
    "swiglu": (2, f"{ENGINE} --swiglu --normalization RMSNorm --disable-bias-linear", FUSED),
    "recomputed": (
        2,
        f"{ENGINE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        FUSED,
    ),
}


@pytest.fixture(autouse=True)
def kernels_are_there(monkeypatch):
    """Leave it to the case whether gradients are accumulated by a kernel."""
    needed = tuple(flag for flag in cpu.flags.CPU_FLAGS if flag != (SEPARATE,))
    monkeypatch.setattr(cpu.flags, "CPU_FLAGS", needed)


@pytest.mark.parametrize("schedule", ["zb-h1", "v-half", "1f1b"])
@pytest.mark.parametrize("case", CASES)
def test_the_gradients_are_stock_s(case, schedule):
    world_size, flags, fusion = CASES[case]
    words = [*flags.split(), *fusion.split()]
    ours = comparison.run(world_size, [*words, "--pipeline-schedule", schedule])
    comparison.assert_same_gradients(ours, comparison.stock(world_size, *words))


def _stores(chunks):
    return {
        type(module).__name__: type(module.wgrad_store)
        for chunk in chunks
        for module in chunk.modules()
        if hasattr(module, "wgrad_store")
    }


@pytest.mark.parametrize("flags", [ENGINE, EXPERTS])
def test_every_linear_layer_defers(flags):
    runs = training.train(2, [*flags.split(), SEPARATE, "--pipeline-schedule", "zb-h1"], grab=_stores)
    kinds = {name for run in runs for name in run.grabbed}
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear"} <= kinds
    assert ("--moe-grouped-gemm" in flags) == any("Grouped" in name for name in kinds)
    assert all(store is DeferringStore for run in runs for store in run.grabbed.values())
