"""A vocabulary that all ranks of the pipeline share trains as stock does, up to the order of sums."""

from pathlib import Path

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.recorded_costs import measured_costs
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.schedule.vocabulary import share
from megatron_pp_ext.view import trace_file
from tests.support import rounding
from tests.support.comparison import assert_close, distance, run, stock
from tests.support.tiers import first, wide
from tests.support.training import train

PIPELINE = "--pipeline-model-parallel-size"
SHARED = ("--pipeline-vocabulary", "shared")
UNTIED = "--untie-embeddings-and-output-weights"
TP2 = ("--tensor-model-parallel-size", "2")
EVALUATION = ("--eval-iters", "2", "--eval-interval", "2")
SMALL = (PIPELINE, "2", "--num-layers", "4", "--global-batch-size", "4")
FLEX = "flex --pipeline-memory-limit 1.5"
VOCABULARY = "--vocab-size"

CASES = {
    "1f1b-pp2-tied": (2, "1f1b", (PIPELINE, "2", *EVALUATION)),
    "zb-h1-pp4-untied": (4, "zb-h1", (PIPELINE, "4", UNTIED)),
    "v-half-pp3-tied-odd": (3, "v-half", (PIPELINE, "3", "--num-layers", "6", "--global-batch-size", "7")),
    "v-half-pp4-untied": (4, "v-half", (PIPELINE, "4", UNTIED, *EVALUATION)),
    "v-min-pp2-untied": (2, "v-min", (PIPELINE, "2", UNTIED)),
    "v-zb-pp4-tied": (4, "v-zb", (PIPELINE, "4")),
    "v-zb-fewer-than-ranks": (4, "v-zb", (PIPELINE, "4", "--global-batch-size", "3")),
    "interleaved-pp2-tied": (2, "interleaved", (PIPELINE, "2")),
    "interleaved-pp4-untied": (4, "interleaved", (PIPELINE, "4", UNTIED)),
    "gpipe-one-microbatch": (2, "gpipe", (PIPELINE, "2", "--global-batch-size", "1")),
    "flex-pp2-tied": (2, FLEX, (PIPELINE, "2")),
    "flex-pp4-untied": (4, FLEX, (PIPELINE, "4", UNTIED)),
    "tp2-untied": (4, "zb-h1", (*SMALL, *TP2, UNTIED)),
    "tp2-tied-sequence-parallel": (4, "v-half", (PIPELINE, "2", *TP2, "--sequence-parallel")),
    "cp2-per-token": (
        4,
        "v-half",
        (*SMALL, "--context-parallel-size", "2", "--calculate-per-token-loss"),
    ),
    "dp2-overlap": (4, "v-half", (*SMALL, "--overlap-grad-reduce", "--ddp-bucket-size", "2000")),
    "dp2-distributed-overlap": (
        4,
        "interleaved",
        (
            PIPELINE,
            "2",
            UNTIED,
            "--use-distributed-optimizer",
            "--overlap-grad-reduce",
            "--overlap-param-gather",
        ),
    ),
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
    "experts": (
        4,
        "zb-h1",
        (
            *(PIPELINE, "2", "--num-experts", "4", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear"),
            *("--expert-model-parallel-size", "2"),
        ),
    ),
    "maximal-update": (2, "zb-h1", (PIPELINE, "2", UNTIED, "--use-mup", "--mup-width-mult", "2.0")),
    "recomputed": (
        2,
        "v-half",
        (
            *(PIPELINE, "2", "--recompute-granularity", "full", "--recompute-method", "uniform"),
            *("--recompute-num-layers", "1"),
        ),
    ),
    "decoupled-rate": (
        2,
        "1f1b",
        (*SMALL, UNTIED, "--decoupled-lr", "0.002", "--decoupled-min-lr", "0.002"),
    ),
    "accumulated-loss-of-parts": (3, "1f1b", (PIPELINE, "3", UNTIED, "--num-layers", "6", VOCABULARY, "65")),
}
"""Ranks, schedule and flags.  The last has more rows than three ranks share evenly."""

ALWAYS = {
    *("tp2-untied", "cp2-per-token", "dp2-overlap", "llama-like"),
    *("dp2-distributed-overlap-unaligned", "decoupled-rate", "accumulated-loss-of-parts"),
}
"""What is not wide."""


@pytest.mark.parametrize("case", [case if case in ALWAYS else wide(case) for case in CASES])
def test_trains_as_stock(case: str) -> None:
    ranks, schedule, flags = CASES[case]
    ours = run(ranks, [*flags, *SHARED, "--pipeline-schedule", *schedule.split()])
    assert_close(ours, stock(ranks, *flags))


@pytest.mark.wide
@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_low_precision_is_as_close_to_full_precision_as_stock_is(precision: str, tied: str) -> None:
    flags = (PIPELINE, "2", *([] if tied == "tied" else [UNTIED]))
    low = (*flags, precision, *(("--initial-loss-scale", "1024") if precision == "--fp16" else ()))
    full = stock(2, *flags)
    ours = run(2, [*low, *SHARED, "--pipeline-schedule", "v-half"])
    assert distance(ours, full) < 1.5 * distance(stock(2, *low), full)
    assert ours.losses == pytest.approx(
        stock(2, *low).losses, rel=rounding.relative(160, rounding.BFLOAT16) / 32
    )


def test_several_samples_at_once() -> None:
    """Labels come sample by sample, and hidden states token by token."""
    flags = (*SMALL, UNTIED, "--micro-batch-size", "2", *EVALUATION)
    ours = run(2, [*flags, *SHARED, "--pipeline-schedule", "zb-h1"])
    assert_close(ours, stock(2, *flags))


@pytest.mark.parametrize("schedule", first(1, ["v-half", "1f1b"]))
def test_measured_peaks_are_those_of_the_simulation(schedule: str, tmp_path: Path) -> None:
    """The bytes that every rank keeps, of its layers and between S and T, which the trace shows."""
    trace = tmp_path / "trace.json"
    flags = (PIPELINE, "4", UNTIED, VOCABULARY, "1024", "--pipeline-schedule", schedule, *SHARED)
    train(4, [*flags, "--pipeline-trace", str(trace)])
    step = trace_file.read(trace)
    order = step.timeline().schedule
    assert order.orders == share(lambda count: catalog.build(schedule, 4, count), 8).orders
    measured = measured_costs([step])
    expected = simulate(order, measured).peak_activations
    for record, peak in zip(step.records, expected, strict=True):
        assert record.peak_bytes == pytest.approx(peak, rel=0.05)
    assert measured.vocabulary is not None
    tokens, hidden, rows = 32, 32, 1024 // 4
    # Between S and T: the exponentials, the hidden state and its gradient's part, in single precision.
    assert measured.vocabulary.activation == pytest.approx(4 * tokens * (rows + 2 * hidden), rel=0.05)
