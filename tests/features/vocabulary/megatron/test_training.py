"""A vocabulary that all ranks of the pipeline share trains as stock does, up to the order of sums."""

import pytest

from megatron_pp_ext.features.vocabulary.share import share
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.recorded import measured_costs
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.comparison import assert_close, run, stock, traced
from tests.support.tiers import wide

PIPELINE = "--pipeline-model-parallel-size"
SHARED = ("--pipeline-vocabulary", "shared")
UNTIED = "--untie-embeddings-and-output-weights"
TP2 = ("--tensor-model-parallel-size", "2")
EVALUATION = ("--eval-iters", "2", "--eval-interval", "2")
SMALL = (PIPELINE, "2", "--num-layers", "4", "--global-batch-size", "4")
VOCABULARY = "--vocab-size"

CASES = {
    "v-half-pp3-tied-odd": (3, "v-half", (PIPELINE, "3", "--num-layers", "6", "--global-batch-size", "7")),
    "gpipe-one-microbatch": (2, "gpipe", (PIPELINE, "2", "--global-batch-size", "1")),
    "tp2-untied": (4, "zb-h1", (*SMALL, *TP2, UNTIED)),
    "cp2-per-token": (4, "v-half", (*SMALL, "--context-parallel-size", "2", "--calculate-per-token-loss")),
    "dp2-overlap": (4, "v-half", (*SMALL, "--overlap-grad-reduce", "--ddp-bucket-size", "2000")),
    "dp2-distributed-overlap-unaligned": (
        4,
        "1f1b",
        (
            *(*SMALL, UNTIED, "--use-distributed-optimizer", "--overlap-grad-reduce"),
            *("--overlap-param-gather", "--no-align-grad-reduce", "--no-align-param-gather"),
        ),
    ),
    "dropout": (2, "1f1b", (PIPELINE, "2", "--attention-dropout", "0.1", "--hidden-dropout", "0.1")),
    "llama-like": (
        2,
        "v-zb",
        (
            *(*SMALL, UNTIED, "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
            *("--position-embedding-type", "rope"),
        ),
    ),
    "maximal-update": (2, "zb-h1", (PIPELINE, "2", UNTIED, "--use-mup", "--mup-width-mult", "2.0")),
    "decoupled-rate": (2, "1f1b", (*SMALL, UNTIED, "--decoupled-lr", "0.002", "--decoupled-min-lr", "0.002")),
    "accumulated-loss-of-parts": (3, "1f1b", (PIPELINE, "3", UNTIED, "--num-layers", "6", VOCABULARY, "65")),
}
"""Ranks, schedule and flags.  The last has more rows than three ranks share evenly."""

ALWAYS = {
    *("tp2-untied", "cp2-per-token", "dp2-overlap", "llama-like"),
    *("dp2-distributed-overlap-unaligned", "accumulated-loss-of-parts"),
}
"""What is not wide."""


@pytest.mark.parametrize("case", [case if case in ALWAYS else wide(case) for case in CASES])
def test_trains_as_stock(case: str) -> None:
    ranks, schedule, flags = CASES[case]
    ours = run(ranks, [*flags, *SHARED, "--pipeline-schedule", *schedule.split()])
    assert_close(ours, stock(ranks, *flags))


def test_several_samples_at_once() -> None:
    """Labels come sample by sample, and hidden states token by token."""
    flags = (*SMALL, UNTIED, "--micro-batch-size", "2", *EVALUATION)
    ours = run(2, [*flags, *SHARED, "--pipeline-schedule", "zb-h1"])
    assert_close(ours, stock(2, *flags))


def test_measured_peaks_are_those_of_the_simulation() -> None:
    """The bytes that every rank keeps, of its layers and between S and T, which the trace shows."""
    flags = (PIPELINE, "4", UNTIED, VOCABULARY, "1024", "--pipeline-schedule", "v-half", *SHARED)
    step = traced(4, flags)
    order = step.timeline().schedule
    assert order.orders == share(lambda count: catalog.build("v-half", 4, count), 8).orders
    measured = measured_costs([step])
    expected = simulate(order, measured).peak_activations
    for record, peak in zip(step.records, expected, strict=True):
        assert record.peak_bytes == pytest.approx(peak, rel=0.05)
    assert measured.head is not None
    tokens, hidden, rows = 32, 32, 1024 // 4
    # Between S and T: the exponentials, the hidden state and its gradient's part, in single precision.
    assert measured.head.activation == pytest.approx(4 * tokens * (rows + 2 * hidden), rel=0.05)
