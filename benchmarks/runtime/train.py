"""How long does a step of real arithmetic take under each schedule?

    python -m benchmarks.runtime.train [--rounds 2] [--steps 2] [--hidden 512]

Trains GPTs on two CPU ranks, a core each, with a number of microbatches that grows within a run.  Runs of all
schedules take turns, and stock's own 1F1B and interleaved schedules are among them.  The simulator's
prediction comes from the actions of one more run of each, recorded in a trace.  Writes results/train-512.md.
"""

import re
import tempfile
from collections import defaultdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.progress import track

from benchmarks.measuring import COMMON, RANKS, TOKENS, in_turns, pretrain, two_cores
from benchmarks.report import RESULTS, Row, publish, table
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.formats import trace_file
from megatron_pp_ext.schedule.simulate import Timeline, simulate

MICROBATCHES = (2, 4, 8, 32)
LAYERS = 4
TRACED = 8
"""Microbatches of the recorded step from whose actions the prediction is made."""

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
    """Return flags of a model with this hidden size, and a vocabulary that does not outweigh its layers."""
    return [*COMMON, *f"--num-layers {LAYERS} --hidden-size {hidden} --vocab-size {8 * hidden}".split()]


def growing(steps: int) -> list[str]:
    """Return flags of a run of ``steps`` steps of each number of microbatches, each after one to warm up.

    Two come before the first number, because Megatron's timers report the second step with the first.
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
    """Return, by microbatches, the seconds of each step and of its forwards and backwards."""
    times: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for step, batch, _, longest in STEP.findall(log):
        times[int(batch)].append((float(step) / 1e3, float(longest) / 1e3))
    return {microbatches: seconds[-steps:] for microbatches, seconds in times.items()}


def recorded(hidden: int, flags: list[str], microbatches: int) -> Timeline:
    """Return a recorded step of ``microbatches``."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        batch = ["--global-batch-size", str(microbatches), "--train-iters", "4"]
        pretrain([*shape(hidden), *batch, *flags, "--pipeline-trace", str(trace)])
        return trace_file.read(trace).timeline()


def predictions(hidden: int, name: str) -> dict[int, float]:
    """Return the simulated seconds of all forwards and backwards by microbatches, with free messages.

    A schedule of flex is compiled for one number of microbatches, so each number has a recorded step.
    """
    family, flags = SYSTEMS[name][0], SYSTEMS[name][1].split()
    if family == "flex":
        steps = {count: recorded(hidden, flags, count) for count in MICROBATCHES}
        return {count: simulate(step.schedule, step.costs).makespan for count, step in steps.items()}
    costs = recorded(hidden, flags, TRACED).costs
    return {count: simulate(catalog.build(family, RANKS, count), costs).makespan for count in MICROBATCHES}


def rows_of(hidden: int, rounds: int, steps: int) -> list[Row]:
    """Return a row for each number of microbatches and system."""
    model = [*shape(hidden), *growing(steps)]
    ways = {name: partial(pretrain, [*model, *flags.split()]) for name, (_, flags) in SYSTEMS.items()}
    times: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for name, logs in in_turns(ways, rounds, title=f"hidden {hidden}").items():
        for log in logs:
            for microbatches, steps_of in step_seconds(log, steps).items():
                times[name, microbatches] += steps_of
    expected = {name: predictions(hidden, name) for name in track(SYSTEMS, "recording")}
    rows: list[Row] = []
    for microbatches in MICROBATCHES:
        stock = median(step for step, _ in times["1f1b (stock)", microbatches])
        for name in SYSTEMS:
            whole, inner = (median(values) for values in zip(*times[name, microbatches], strict=True))
            least = min(step for step, _ in times[name, microbatches])
            predicted = expected[name][microbatches]
            numbers = (whole, least, whole / stock, inner, predicted, inner / predicted)
            rows.append((microbatches, name, *(f"{number:.3f}" for number in numbers)))
    return rows


def main(
    out: Annotated[Path | None, typer.Option(help="The page.  [default: results/train-HIDDEN.md]")] = None,
    rounds: Annotated[int, typer.Option(help="Runs of each system, which take turns.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps that count, of each number of microbatches.")] = 2,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 512,
) -> None:
    """Measure, and write the table."""
    with two_cores():
        rows = rows_of(hidden, rounds, steps)
    head = ("m", "schedule", "step", "least", "of 1F1B's", "inner", "predicted", "inner/predicted")
    about = (
        f"p = {RANKS}, {LAYERS} layers, {TOKENS} tokens, fp32. Seconds. Medians of {rounds} x {steps} steps, "
        "systems in turns. Inner: forwards and backwards, of the rank that took longest; predicted: the same "
        "by the simulator, messages free, from the median seconds of the actions in a recorded step of "
        f"{TRACED} microbatches (flex: of as many)."
    )
    title = f"Steps of real arithmetic, hidden size {hidden}"
    publish(out or RESULTS / f"train-{hidden}.md", title, about, table(head, rows))


if __name__ == "__main__":
    typer.run(main)
