"""Sequences in slices train as whole ones do, up to the order in which sums are taken.

Attention of a slice adds up its scores, and the gradients of keys and values, in other pieces than that of a
whole sequence, and every weight's gradient is a sum over slices.  So losses and gradients are equal within
the rounding of these sums, and not to the last bit.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from megatron_pp_ext.megatron import requested
from megatron_pp_ext.schedule.actions import Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.formats import trace_file
from megatron_pp_ext.schedule.recorded import RecordedStep
from megatron_pp_ext.schedule.simulate import simulate
from tests.support import architectures, rounding, training
from tests.support.comparison import assert_close, assert_same_bits, distance, run, stock
from tests.support.tiers import first, wide

PIPELINE = "--pipeline-model-parallel-size"
PP2 = (PIPELINE, "2")
LLAMA = (
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--group-query-attention", "--num-query-groups", "2", "--untie-embeddings-and-output-weights"),
)
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
ROTARY = ("--position-embedding-type", "rope")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
    *("--moe-token-dispatcher-type", "alltoall"),
)
SHARED = (*EXPERTS, "--expert-model-parallel-size", "2")
PREDICTION = ("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.3")
FLEX = "flex --pipeline-memory-limit 1.0"
WINDOW = ("--window-size", "8,0", "--softmax-type", "learnable")
EVALUATION = ("--eval-interval", "1", "--eval-iters", "2", "--train-iters", "2", "--clip-grad", "0")

CASES = {
    "tied, learned positions": (2, "v-half", 8, PP2),
    "grouped queries, evaluation": (2, "zb-h1", 4, (*PP2, *LLAMA, *EVALUATION)),
    "tensor-parallel": (4, "v-half", 16, (*PP2, *LLAMA, *TP2, "--calculate-per-token-loss")),
    "1F1B": (2, "1f1b", 16, (*PP2, *LLAMA)),
    "interleaved": (2, "interleaved", 16, (*PP2, *LLAMA)),
    "V-Min": (2, "v-min", 2, (*PP2, *LLAMA)),
    "flex": (2, "flex --pipeline-memory-limit 0.7", 8, (*PP2, *LLAMA)),
    "four ranks, two samples": (4, "v-half", 16, (PIPELINE, "4", "--micro-batch-size", "2")),
    "full recomputation": (2, "zb-h1", 8, (*PP2, *LLAMA, *FULL)),
    "selective recomputation": (2, "v-half", 8, (*PP2, *LLAMA, "--recompute-granularity", "selective")),
    "replicas": (4, "v-half", 8, (*PP2, *LLAMA, *DISTRIBUTED)),
    "windows and sinks": (2, "zb-h1", 4, (*PP2, *LLAMA, *WINDOW)),
    "experts": (2, "zb-h1", 8, (*PP2, *LLAMA, *EXPERTS)),
    "experts of two pipelines": (4, "zb-h1", 8, (*PP2, *LLAMA, *SHARED)),
    "prediction, tied, two samples": (
        2,
        "v-half",
        8,
        (*PP2, *PREDICTION, *ROTARY, "--micro-batch-size", "2"),
    ),
    "prediction, tensor-parallel": (4, "v-half", 8, (*PP2, *LLAMA, *TP2, *PREDICTION, *EVALUATION)),
    "prediction, experts": (4, "zb-h1", 8, (*PP2, *LLAMA, *SHARED, *PREDICTION)),
    "prediction, planned": (2, f"{FLEX} --pipeline-order rule", 12, (*PP2, *LLAMA, *PREDICTION, *FULL)),
    "planned in each step": (2, "v-half --pipeline-order rule", 12, (*PP2, *LLAMA)),
    "planned, two samples": (2, "zb-h1 --pipeline-order search", 8, (*PP2, "--micro-batch-size", "2")),
    "planned, replicas": (4, "v-half --pipeline-order rule", 8, (*PP2, *LLAMA, *DISTRIBUTED)),
    "planned, tensor-parallel": (4, "v-half --pipeline-order rule", 8, (*PP2, *LLAMA, *TP2)),
}
ALWAYS = {"tensor-parallel"}
"""What is not wide."""


def sliced(schedule: str, tokens: int) -> tuple[str, ...]:
    """The flags for slices of so many tokens, of the 32 that a sequence has."""
    return ("--pipeline-schedule", *schedule.split(), "--pipeline-slice-tokens", str(tokens))


@pytest.mark.parametrize("case", [case if case in ALWAYS else wide(case) for case in CASES])
def test_trains_as_whole_sequences(case: str) -> None:
    ranks, schedule, tokens, flags = CASES[case]
    ours, whole = run(ranks, [*flags, *sliced(schedule, tokens)]), stock(ranks, *flags)
    assert_close(ours, whole)
    for one, other in zip(ours.logged, whole.logged, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"load_balancing_loss"}:
            assert float(one[name]) == pytest.approx(float(other[name]), rel=1e-5), name


@pytest.mark.wide
@pytest.mark.parametrize("more", [(), ("--mtp-num-layers", "1")])
def test_multi_head_latent_attention(more: tuple[str, ...]) -> None:
    """DeepSeek-V3's layers; without the losses of its router, which are taken over a slice's tokens."""
    flags = [*PP2, *architectures.flags("deepseek-v3", 2), "--moe-aux-loss-coeff", "0", *more]
    assert_close(run(2, [*flags, *sliced("v-half", 8)]), stock(2, *flags))


@pytest.mark.wide
def test_a_repeated_prediction_of_a_hybrid_model() -> None:
    """Nemotron 3's, whose layers with states are before those of the prediction."""
    *flags, _ = [*PP2, *architectures.flags("nemotron-3", 4)]
    flags += ["ME|ME|M*|ME/*E/*E", "--mtp-num-layers", "2", "--mtp-use-repeated-layer"]
    flags += ["--moe-aux-loss-coeff", "0"]
    whole = run(2, [*flags, "--pipeline-schedule", "v-half"])
    assert_close(run(2, [*flags, *sliced("v-half", 8)]), whole)


@pytest.mark.wide
def test_router_losses_are_means_over_slices() -> None:
    """The router's loss of slices is no sum of theirs: it balances the tokens of each, and is the larger."""
    flags = [*PP2, *LLAMA, *EXPERTS, "--moe-router-load-balancing-type", "aux_loss"]
    flags += ["--moe-aux-loss-coeff", "0.01"]
    ours, whole = run(2, [*flags, *sliced("v-half", 8)]), stock(2, *flags)
    assert ours.losses[0] == pytest.approx(whole.losses[0], rel=rounding.relative())
    assert ours.losses == pytest.approx(whole.losses, rel=1e-3)
    assert distance(ours, whole) < 0.05
    for one, other in zip(ours.logged, whole.logged, strict=True):
        (name,) = one.keys() - {"lm loss"}
        assert float(other[name]) <= float(one[name]) < 1.2 * float(other[name])


@pytest.mark.wide
def test_half_precision() -> None:
    """Slices are no further from whole sequences in bf16 than these are from fp32."""
    flags = (*PP2, *LLAMA)
    whole = stock(2, *flags, "--bf16")
    ours = run(2, [*flags, "--bf16", *sliced("v-half", 8)])
    assert distance(ours, whole) < distance(whole, stock(2, *flags))
    assert ours.losses == pytest.approx(whole.losses, rel=rounding.BFLOAT16)


def test_one_slice_is_the_whole_sequence() -> None:
    flags = (*PP2, *LLAMA)
    assert_same_bits(run(2, [*flags, *sliced("v-half", 32)]), stock(2, *flags))


def planned_bytes(schedule: Schedule) -> int:
    """The peak of rank 0 with 4 of the tiny GPT's layers, which recomputes them, in slices.

    A layer keeps its input of each slice, and keys and values of the sequence; with the last slice's backward
    comes what that owes to the others.
    """
    tokens, hidden, layers, size = 32, 32, 4, 4
    of_token = layers * hidden * size
    live, owed, peaks = 0, 0, [0]
    for action in schedule.orders[0]:
        _, _, begin, end = schedule.units[action.microbatch]
        of_slice = of_token * (end - begin)
        if action.kind is Kind.F:
            live += of_slice + 2 * tokens * of_token * (begin == 0)
        else:
            if end == tokens:
                owed = 2 * begin * of_token
                live += owed
            live -= of_slice
        peaks.append(live)
        if action.kind is not Kind.F and begin == 0:
            live -= 2 * tokens * of_token + owed
    assert live == 0
    return max(peaks)


def recorded(flags: Sequence[str]) -> tuple[RecordedStep, Schedule]:
    """The record of the last of two steps on two ranks, and its schedule."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        words = ["--train-iters", "2", *flags, "--pipeline-trace", str(file)]
        of_ranks = training.train(2, words, grab=lambda chunks: requested.require().source.ordinary.units)
        step = trace_file.read(file)
    return step, replace(step.timeline().schedule, units=of_ranks[0].grabbed)


@pytest.mark.parametrize("count", first(1, [4, 2, 8]))
def test_measured_bytes_are_those_of_the_plan(count: int) -> None:
    """On the first rank, which keeps a few bytes more: its embedding saves the tokens."""
    step, schedule = recorded([*PP2, *FULL, *sliced("1f1b", 32 // count)])
    assert step.records[0].peak_bytes == pytest.approx(planned_bytes(schedule), rel=0.05)


@pytest.mark.wide
def test_units_in_flight_are_those_of_the_simulation() -> None:
    """Keys and values are held as long as their first slice: they are in flight with it."""
    step, schedule = recorded([*PP2, *LLAMA, *sliced("v-half", 8)])
    assert schedule.whole_microbatches == 8 and schedule.microbatches >= 4 * 8
    costs = Costs.unit(schedule.placement)
    peaks = simulate(schedule, costs).peak_activations
    assert [record.peak_microbatches for record in step.records] == [round(peak) for peak in peaks]
