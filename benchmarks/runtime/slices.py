"""What do slices of a sequence do to the step and the activations of a real GPT?

    python -m benchmarks.runtime.slices [--rounds 1] [--steps 1] [--tokens 4096]

Trains a GPT with long sequences on four CPU ranks: under Megatron's own 1F1B and interleaved schedules, and
under 1F1B and V-Half with 1, 2, 4 and 8 slices of every sequence.  Runs take turns.  Writes
results/slices_runtime.md.
"""

import shlex
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import typer

from benchmarks.measuring import MADE_UP, in_turns, logged_seconds, pretrain
from benchmarks.report import RESULTS, Out, Row, publish, table
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.formats import trace_file
from megatron_pp_ext.schedule.simulate import simulate

RANKS, LAYERS, MICROBATCHES = 4, 8, 4
LLAMA = shlex.split(
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --recompute-granularity selective"
)
COUNTS = (1, 2, 4, 8)
STOCK = {"stock 1f1b": [], "stock interleaved": ["--num-virtual-stages-per-pipeline-rank", "2"]}


class Found(NamedTuple):
    """The seconds of the steps of a run, and the most bytes of activations that any rank kept in the last."""

    seconds: list[float]
    peak: int


def model(tokens: int, hidden: int, steps: int) -> list[str]:
    """Return the flags of a run of ``steps`` steps."""
    return [
        *MADE_UP,
        *f"--pipeline-model-parallel-size {RANKS} --micro-batch-size 1 --num-layers {LAYERS}".split(),
        *f"--hidden-size {hidden} --num-attention-heads 2 --vocab-size 1024 --lr 1e-3".split(),
        *f"--seq-length {tokens} --max-position-embeddings {tokens}".split(),
        *f"--global-batch-size {MICROBATCHES} --train-iters {steps}".split(),
        *LLAMA,
    ]


def flags_of(name: str, count: int, tokens: int) -> list[str]:
    """Return the flags of one way to train."""
    if name in STOCK:
        return STOCK[name]
    return ["--pipeline-schedule", name, "--pipeline-slice-tokens", str(tokens // count)]


def run(flags: list[str], steps: int) -> Found:
    """Train and trace the last step."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        log = pretrain([*flags, "--pipeline-trace", str(trace)], RANKS)
        peak = max(record.peak_bytes for record in trace_file.read(trace).records)
    return Found(logged_seconds(log)[-steps:], peak)


def expected(name: str) -> str:
    """Return the bubble of a schedule at unit cost without slices, for the reader to compare with."""
    built = catalog.build(name.removeprefix("stock "), RANKS, MICROBATCHES)
    return f"{simulate(built, Costs.unit(built.placement)).bubble:.3f}"


def main(
    out: Out = RESULTS / "slices_runtime.md",
    rounds: Annotated[int, typer.Option(help="Runs of each system, which take turns.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps of a run that count, behind one to warm up.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    hidden: Annotated[int, typer.Option(help="The hidden size.")] = 64,
) -> None:
    """Measure, and write a table."""
    systems = [*((name, 1) for name in STOCK), *((name, k) for name in ("1f1b", "v-half") for k in COUNTS)]
    flags = model(tokens, hidden, steps + 1)
    ways = {system: partial(run, [*flags, *flags_of(*system, tokens)], steps) for system in systems}
    logs = in_turns(ways, rounds)
    first = max(measured.peak for measured in logs["stock 1f1b", 1])
    rows: list[Row] = []
    for (name, count), of_system in logs.items():
        seconds = median(second for measured in of_system for second in measured.seconds)
        peak = max(measured.peak for measured in of_system)
        numbers = (f"{seconds:.2f}", f"{peak / 2**20:.1f}", f"{peak / first:.3f}")
        rows.append((name, count, *numbers, expected(name)))
    heads = ("schedule", "slices", "step", "MiB kept", "of stock's 1F1B", "bubble without slices")
    about = (
        f"p = {RANKS}, m = {MICROBATCHES}, {LAYERS} layers of hidden size {hidden}, {tokens} tokens, fp32, "
        f"core attention recomputed. Seconds of a step: medians of {rounds} x {steps} steps, systems in "
        "turns. Where ranks share cores, a step takes what all ranks compute, and a bubble costs nothing. "
        "MiB are the most activations that any rank keeps, keys and values of earlier slices included."
    )
    publish(out, "Slices of sequences", about, table(heads, rows))


if __name__ == "__main__":
    typer.run(main)
