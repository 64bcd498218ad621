"""How long does a step of real arithmetic take under each schedule?

    python benchmarks/train.py [--rounds 2] [--steps 2] [--hidden 512]

Trains GPTs on two CPU ranks, a core each, with a number of microbatches that grows within a run.  Runs of all
schedules take turns; stock's own 1F1B and interleaved schedules are among them.  What the simulator predicts
comes from the actions of one more run each, recorded in a trace.  Writes benchmarks/results/train-512.md.
"""

import os
import platform
import re
import tempfile
from collections import defaultdict
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from jobs import COMMON, RANKS, TOKENS, pretrain, two_cores
from rich.progress import track
from tables import Row, table

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from megatron_pp_ext.view import trace_file

RESULTS = Path(__file__).parent / "results"
MICROBATCHES = (2, 4, 8, 32)
LAYERS = 4
TRACED = 8
"""Microbatches of the step whose actions the prediction is made from."""

SYSTEMS = {
    "1f1b (stock)": ("1f1b", ""),
    "interleaved (stock)": ("interleaved", "--num-virtual-stages-per-pipeline-rank 2"),
    "zb-h1": ("zb-h1", "--pipeline-schedule zb-h1"),
    "v-half": ("v-half", "--pipeline-schedule v-half"),
    "v-zb": ("v-zb", "--pipeline-schedule v-zb"),
    "flex, 1F1B's memory": ("flex", "--pipeline-schedule flex --pipeline-memory-limit 1"),
}
STEP = re.compile(
    r"elapsed time per iteration \(ms\): ([0-9.]+).*?global batch size:\s+(\d+).*?"
    r"forward-backward \.*: \(([0-9.]+), ([0-9.]+)\)",
    re.DOTALL,
)


def shape(hidden: int) -> list[str]:
    """A model of this hidden size, with a vocabulary that does not outweigh its layers."""
    return [*COMMON, *f"--num-layers {LAYERS} --hidden-size {hidden} --vocab-size {8 * hidden}".split()]


def growing(steps: int) -> list[str]:
    """A run of ``steps`` steps of each number of microbatches, and one before that does not count.

    Two come before the first: Megatron's timers tell its second step with its first.
    """
    samples = [(steps + 1) * microbatches for microbatches in MICROBATCHES]
    samples[0] += MICROBATCHES[0]
    tokens = [TOKENS * start for start in accumulate([0, *samples[:-1]])]
    schedule = " ".join(f"{start}:{batch}" for start, batch in zip(tokens, MICROBATCHES, strict=True))
    return [
        "--step-batch-size-schedule", schedule, "--train-samples", str(sum(samples)),
        "--timing-log-level", "1", "--timing-log-option", "minmax",
    ]  # fmt: skip


def step_seconds(log: str, steps: int) -> dict[int, list[tuple[float, float]]]:
    """(seconds of the step, of its forwards and backwards) by microbatches: the last ``steps`` of each."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for step, batch, _, longest in STEP.findall(log):
        found[int(batch)].append((float(step) / 1e3, float(longest) / 1e3))
    return {microbatches: seconds[-steps:] for microbatches, seconds in found.items()}


def recorded(hidden: int, flags: list[str], microbatches: int) -> Timeline:
    """What ran in a step of ``microbatches``, and what its actions took."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        batch = [
            "--global-batch-size",
            str(microbatches),
            "--train-iters",
            "4",
            "--pipeline-trace",
            str(trace),
        ]
        pretrain([*shape(hidden), *batch, *flags])
        return trace_file.read(trace).timeline()


def predictions(hidden: int, name: str) -> dict[int, float]:
    """Seconds of all forwards and backwards by microbatches, messages free.

    flex has no schedule but what it compiles for a number of microbatches, so it is recorded with each.
    """
    family, flags = SYSTEMS[name][0], SYSTEMS[name][1].split()
    if family == "flex":
        steps = {count: recorded(hidden, flags, count) for count in MICROBATCHES}
        return {count: simulate(step.schedule, step.costs).makespan for count, step in steps.items()}
    costs = recorded(hidden, flags, TRACED).costs
    return {count: simulate(catalog.build(family, RANKS, count), costs).makespan for count in MICROBATCHES}


def rows_of(hidden: int, rounds: int, steps: int) -> list[Row]:
    """A row for each number of microbatches and system."""
    times: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    jobs = [(number, name) for number in range(rounds) for name in SYSTEMS]
    for _, name in track(jobs, f"hidden {hidden}"):
        log = pretrain([*shape(hidden), *growing(steps), *SYSTEMS[name][1].split()])
        for microbatches, found in step_seconds(log, steps).items():
            times[name, microbatches] += found
    expected = {name: predictions(hidden, name) for name in track(SYSTEMS, "recording")}
    rows: list[Row] = []
    for microbatches in MICROBATCHES:
        stock = median(step for step, _ in times["1f1b (stock)", microbatches])
        for name in SYSTEMS:
            whole, inner = (median(values) for values in zip(*times[name, microbatches], strict=True))
            rows.append(
                (
                    microbatches,
                    name,
                    f"{whole:.3f}",
                    f"{min(step for step, _ in times[name, microbatches]):.3f}",
                    f"{whole / stock:.3f}",
                    f"{inner:.3f}",
                    f"{expected[name][microbatches]:.3f}",
                    f"{inner / expected[name][microbatches]:.3f}",
                )
            )
    return rows


def main(
    rounds: Annotated[int, typer.Option(help="Runs of each system; systems take turns.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps that count, of each number of microbatches.")] = 2,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 512,
) -> None:
    """Measure, and write the table."""
    load = os.getloadavg()[0]
    with two_cores():
        rows = rows_of(hidden, rounds, steps)
    head = ("m", "schedule", "step", "least", "of 1F1B's", "inner", "predicted", "inner/predicted")
    text = [
        f"# Steps of real arithmetic, hidden size {hidden}",
        "",
        f"`python benchmarks/train.py --rounds {rounds} --steps {steps} --hidden {hidden}` on "
        f"{platform.machine()}, {RANKS} cores, load {load:.1f} at the start, {datetime.now(UTC):%Y-%m-%d}: "
        f"p = {RANKS}, {LAYERS} layers, {TOKENS} tokens, fp32.",
        "",
        f"Seconds. Medians of {rounds} x {steps} steps, systems in turns. Inner: forwards and backwards, of "
        "the rank that took longest; predicted: the same by the simulator, messages free, from the median "
        f"seconds of the actions in a recorded step of {TRACED} microbatches (flex: of as many).",
        "",
        table(head, rows),
    ]
    (RESULTS / f"train-{hidden}.md").write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
