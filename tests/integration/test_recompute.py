"""Recomputed activations: the halves of a split backward still are the whole, to the last bit."""

import pytest

from tests.support.comparison import assert_same_gradients, run, stock

PIPELINE = ("--pipeline-model-parallel-size", "2")
FULL = "--recompute-granularity full --recompute-method"
SELECTIVE = "--disable-bias-linear --recompute-granularity selective --recompute-modules"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
SHARED = f"{EXPERTS} --moe-shared-expert-intermediate-size 32"
FLEX = "flex --pipeline-memory-limit 0.75"


# What Megatron recomputes by Transformer Engine's help (layernorm, moe_act) is not for a CPU, and "mlp" with
# biases is refused.
@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        (f"{FULL} uniform --recompute-num-layers 2", "zb-h1"),
        (f"{FULL} uniform --recompute-num-layers 2", "v-zb"),
        (f"{FULL} block --recompute-num-layers 1", "v-half"),
        (f"{FULL} block --recompute-num-layers 1", "interleaved"),
        (f"{FULL} block --recompute-num-layers 1", FLEX),
        (f"{SELECTIVE} core_attn mlp", "zb-h1"),
        (f"{SELECTIVE} core_attn mlp", "v-half"),
        (f"{SELECTIVE} moe {EXPERTS}", "zb-h1"),
        (f"{SELECTIVE} core_attn shared_experts {SHARED}", "v-half"),
    ],
)
def test_same_gradients_as_stock(flags: str, schedule: str) -> None:
    base = (*PIPELINE, *flags.split())
    assert_same_gradients(run(2, [*base, "--pipeline-schedule", *schedule.split()]), stock(2, *base))


def test_recomputed_gradients_are_those_without() -> None:
    base = (*PIPELINE, "--disable-bias-linear")
    recomputed = run(2, [*PIPELINE, *f"{SELECTIVE} core_attn mlp --pipeline-schedule v-half".split()])
    assert_same_gradients(recomputed, stock(2, *base))
