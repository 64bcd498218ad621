"""Recurrent layers, and sparse attention, train in slices as in whole sequences but for rounding of sums.

Their kernels need a GPU.  In their place stand plain loops over tokens (Mamba-2), and Megatron's own torch
implementation of the gated delta rule.
"""

import pytest

from tests.support import architectures, own_loop, own_loop_lengths, own_process
from tests.support.comparison import assert_close, distance, run, stock
from tests.support.tiers import wide

PIPELINE = "--pipeline-model-parallel-size"
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
EVALUATION = ("--eval-interval", "1", "--eval-iters", "2", "--train-iters", "2", "--clip-grad", "0")
FLEX = "flex --pipeline-memory-limit 0.7"
HYBRID, DELTA, SPARSE = "nemotron-h", "qwen3-next", "deepseek-v3.2"

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
    "sparse attention, V-Half": (2, SPARSE, "v-half", 8, ()),
    "sparse attention, 1F1B by tokens": (2, SPARSE, "1f1b", 4, ("--calculate-per-token-loss",)),
    "sparse attention, flex": (2, SPARSE, FLEX, 8, ()),
    "sparse attention, planned in each step": (2, SPARSE, "v-half --pipeline-order rule", 12, ()),
    "sparse attention, full recomputation": (2, SPARSE, "zb-h1", 8, FULL),
    "sparse attention, two samples": (2, SPARSE, "zb-h1", 16, ("--micro-batch-size", "2")),
    "sparse attention, evaluation": (2, SPARSE, "v-half", 8, EVALUATION),
}
ALWAYS = {"Mamba-2, V-Half"}
"""What is not wide."""


def flags_of(model: str, schedule: str) -> list[str]:
    """Return the flags of ``model``; the losses of its routers are taken over a slice's tokens.

    All of a few indexer heads may have no score for a key.  Which of several such keys are chosen depends on
    the number of keys.  Nor do weights move where attention is sparse: Adam would make of the rounding of an
    indexer's tiny gradients updates as large as others, and some choices would differ.
    """
    stages = 4 if schedule.startswith(("v-", "flex")) else 2
    heads = ["--dsa-indexer-n-heads", "32", "--lr", "0"] if model == SPARSE else []
    return [PIPELINE, "2", *architectures.flags(model, stages), *heads, "--moe-aux-loss-coeff", "0"]


@pytest.mark.parametrize("case", [case if case in ALWAYS else wide(case) for case in CASES])
def test_trains_as_whole_sequences(case: str) -> None:
    ranks, model, schedule, tokens, more = CASES[case]
    flags = [*flags_of(model, schedule), *more]
    whole = stock(ranks, *flags_of(model, "1f1b"), *more)
    flags += ["--pipeline-schedule", *schedule.split(), "--pipeline-slice-tokens", str(tokens)]
    ours = run(ranks, flags)
    assert distance(ours, whole) < 1e-6
    assert_close(ours, whole)
    if model == SPARSE:
        of_indexers = [float(result.logged[0]["indexer loss"]) for result in (ours, whole)]
        assert of_indexers[0] == pytest.approx(of_indexers[1], rel=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("repeats", [False, True])
def test_layers_of_prediction_with_states(repeats: bool) -> None:
    """Also where both depths of prediction are one layer, which a forward calls twice."""
    flags = [PIPELINE, "2", *architectures.FLAGS[HYBRID].split(), "--hybrid-layer-pattern", "M-|M*/M/M"]
    flags += ["--mtp-use-repeated-layer"] if repeats else []
    sliced = ["--pipeline-schedule", "zb-h1", "--pipeline-slice-tokens", "8"]
    assert distance(run(2, [*flags, *sliced]), stock(2, *flags)) < 1e-6


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks found; see ``tests.support.own_loop_states``."""
    return own_process.found("own_loop_states", tmp_path_factory.mktemp("states"))


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["", " packed"])
@pytest.mark.parametrize("name", own_loop_lengths.SCHEDULES)
def test_trains_as_whole_microbatches_of_unlike_length(found: list[dict], name: str, kind: str) -> None:
    """Mamba-2, delta nets and attention in one model; no state enters another document of a pack."""
    ours, whole = ([rank[one + kind] for rank in found] for one in (name, "stock"))
    for one, other in zip(ours[-1].losses, whole[-1].losses, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    own_loop.assert_close_gradients(ours, whole)
