"""Recurrent layers train in slices as in whole sequences, up to the order in which sums are taken.

Their kernels need a GPU.  In their place stand plain loops over tokens (Mamba-2), and Megatron's own torch
implementation of the gated delta rule.
"""

import pytest

from tests.support import architectures
from tests.support.comparison import assert_close, distance, run, stock
from tests.support.tiers import wide

PIPELINE = "--pipeline-model-parallel-size"
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
EVALUATION = ("--eval-interval", "1", "--eval-iters", "2", "--train-iters", "2", "--clip-grad", "0")
FLEX = "flex --pipeline-memory-limit 0.7"
HYBRID, DELTA = "nemotron-h", "qwen3-next"

CASES = {
    "Mamba-2, V-Half": (2, HYBRID, "v-half", 8, ()),
    "delta nets, fewer tokens than a convolution hands on": (2, DELTA, "1f1b", 2, ()),
    "Mamba-2, fewer tokens than a convolution hands on": (2, HYBRID, "1f1b", 2, ()),
    "Mamba-2, flex": (2, HYBRID, FLEX, 4, ()),
    "Mamba-2, planned in each step": (2, HYBRID, "v-half --pipeline-order rule", 12, ()),
    "Mamba-2, planned flex": (2, HYBRID, f"{FLEX} --pipeline-order search", 12, ()),
    "Mamba-2, full recomputation": (2, HYBRID, "zb-h1", 8, FULL),
    "Mamba-2, full recomputation, few tokens": (2, HYBRID, "v-half", 2, FULL),
    "Mamba-2, tensor-parallel": (4, HYBRID, "v-half", 8, TP2),
    "Mamba-2, two samples": (2, HYBRID, "zb-h1", 8, ("--micro-batch-size", "2")),
    "Mamba-2, evaluation": (2, HYBRID, "zb-h1", 8, EVALUATION),
    "Mamba-2 and latent experts": (2, "nemotron-3", "v-half", 8, ()),
    "delta nets, V-Half": (2, DELTA, "v-half", 8, ()),
    "delta nets, flex": (2, DELTA, FLEX, 4, ()),
    "delta nets, planned in each step": (2, DELTA, "v-half --pipeline-order rule", 12, ()),
    "delta nets, full recomputation": (2, DELTA, "v-half", 4, FULL),
    "delta nets, tensor-parallel": (4, DELTA, "zb-h1", 8, TP2),
    "delta nets, two samples": (2, DELTA, "zb-h1", 8, ("--micro-batch-size", "2")),
    "delta nets, evaluation": (2, DELTA, "v-half", 8, EVALUATION),
}
ALWAYS = {"Mamba-2, V-Half", "delta nets, fewer tokens than a convolution hands on"}
"""What is not wide."""


def flags_of(model: str, schedule: str) -> list[str]:
    """Return the flags of ``model``; the losses of its routers are taken over a slice's tokens."""
    stages = 4 if schedule.startswith(("v-", "flex")) else 2
    return [PIPELINE, "2", *architectures.flags(model, stages), "--moe-aux-loss-coeff", "0"]


@pytest.mark.parametrize("case", [case if case in ALWAYS else wide(case) for case in CASES])
def test_trains_as_whole_sequences(case: str) -> None:
    ranks, model, schedule, tokens, more = CASES[case]
    flags = [*flags_of(model, schedule), *more]
    whole = stock(ranks, *flags_of(model, "1f1b"), *more)
    ours = run(
        ranks, [*flags, "--pipeline-schedule", *schedule.split(), "--pipeline-slice-tokens", str(tokens)]
    )
    assert_close(ours, whole)
    assert distance(ours, whole) < 1e-6
