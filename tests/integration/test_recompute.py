"""Recomputed activations: the halves of a split backward still are the whole, to the last bit."""

from pathlib import Path

import pytest

from tests.support.comparison import assert_same_gradients, run, stock
from tests.support.tiers import first
from tests.support.training import train

PIPELINE = ("--pipeline-model-parallel-size", "2")
SMALL = ("--num-layers", "4", "--global-batch-size", "4")
FULL = "--recompute-granularity full --recompute-method"
SELECTIVE = "--disable-bias-linear --recompute-granularity selective --recompute-modules"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
SHARED = f"{EXPERTS} --moe-shared-expert-intermediate-size 32"
DISTRIBUTED = f"{FULL} uniform --recompute-num-layers 1 --distribute-saved-activations"


# What Megatron recomputes by Transformer Engine's help (layernorm, moe_act) is not for a CPU, and "mlp" with
# biases is refused.
@pytest.mark.parametrize(
    ("flags", "schedule"),
    first(
        1,
        [
            (f"{SELECTIVE} moe {EXPERTS}", "zb-h1"),
            (f"{SELECTIVE} core_attn shared_experts {SHARED}", "v-half"),
            (f"{FULL} uniform --recompute-num-layers 2", "v-zb"),
            (f"{SELECTIVE} core_attn mlp", "v-half"),
        ],
    ),
)
def test_same_gradients_as_stock(flags: str, schedule: str) -> None:
    base = (*PIPELINE, *flags.split())
    assert_same_gradients(run(2, [*base, "--pipeline-schedule", *schedule.split()]), stock(2, *base))


def test_a_trace_of_activations_that_tensor_ranks_share(tmp_path: Path) -> None:
    """Megatron cuts the data of a received activation, of which hooks on saved tensors keep copies."""
    base = (*PIPELINE, *SMALL, "--tensor-model-parallel-size", "2", *DISTRIBUTED.split())
    traced = ("--pipeline-schedule", "v-half", "--pipeline-trace", str(tmp_path / "trace.json"))
    assert_same_gradients(run(4, [*base, *traced]), stock(4, *base))


def test_versions_of_weights_beside_activations_that_tensor_ranks_share() -> None:
    base = (*PIPELINE, *SMALL, "--tensor-model-parallel-size", "2", "--untie-embeddings-and-output-weights")
    base += ("--pipeline-schedule", "pipedream-2bw")
    whole = train(4, [*base, *FULL.split(), "uniform", "--recompute-num-layers", "1"])
    distributed = train(4, [*base, *DISTRIBUTED.split()])
    assert len(whole[-1].losses) == 3
    assert distributed[-1].losses == whole[-1].losses
