"""Does a rehearsal tell how long a step takes?

    python benchmarks/rehearse.py [--steps 3] [--rounds 3] [--hidden 512]

Trains GPTs on two CPU ranks, one thread each, rehearses the same flags, and compares.  Writes
benchmarks/results/rehearse.md; with the defaults in about half an hour on two idle cores.
"""

import inspect
import json
import os
import platform
import re
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from jobs import COMMON, RANKS, call, pretrain, two_cores
from tables import Row, table

RESULTS = Path(__file__).parent / "results"
MICROBATCHES = 8
SCHEDULES = {
    "1f1b": "--pipeline-schedule 1f1b",
    "zb-h1": "--pipeline-schedule zb-h1",
    "v-half": "--pipeline-schedule v-half",
    "v-zb": "--pipeline-schedule v-zb",
    "interleaved": "--pipeline-schedule interleaved",
    "flex": "--pipeline-schedule flex --pipeline-memory-limit 0.9",
}
LINE = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")
WARM_UP = 2


def train(flags: list[str], steps: int) -> list[float]:
    """Seconds of each step of the real run, as Megatron logs them, the first ones left out."""
    said = pretrain([*flags, "--train-iters", str(WARM_UP + steps)])
    return [float(ms) / 1e3 for ms in LINE.findall(said)[WARM_UP:]]


def rehearse(flags: list[str], steps: int) -> float:
    """Seconds of a step as the command tells them, both ranks rehearsed at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told.json")
        mpp = [sys.executable, "-c", "from megatron_pp_ext.cli import app; app()", "rehearse"]
        options = ["--ranks", "all", "--at-once", str(RANKS), "--iterations", str(steps), "--json", str(told)]
        call([*mpp, *options, "--", *flags])
        return float(json.loads(told.read_text())["step_seconds"])


def step_times(hidden: int, steps: int, rounds: int) -> str:
    """Seconds of a step: medians of each run's steps; of these the median and the least of all rounds.

    Real and rehearsed runs take turns.  Both ranks are rehearsed at once, each on a core, so that they share
    the machine's memory as those of the real run do.  Machines that others use as well have slow moments: the
    least of several rounds is what such a moment met least.
    """
    rows: list[Row] = []
    for name, chosen in SCHEDULES.items():
        model = f"--global-batch-size {MICROBATCHES} --hidden-size {hidden} --vocab-size {16 * hidden}"
        flags = [*COMMON, *model.split(), *chosen.split()]
        real, rehearsed = [], []
        with two_cores():
            for _ in range(rounds):
                real.append(median(train(flags, steps)))
                rehearsed.append(rehearse(flags, steps))
        row: list[object] = [name]
        for of in (median, min):
            row += [f"{of(real):.3f}", f"{of(rehearsed):.3f}", f"{of(rehearsed) / of(real) - 1:+.1%}"]
        rows.append((*row, " ".join(f"{seconds:.2f}" for seconds in real)))
        print(*rows[-1], file=sys.stderr, flush=True)
    head = (
        "schedule",
        "real, median",
        "rehearsed",
        "error",
        "real, least",
        "rehearsed",
        "error",
        "real rounds",
    )
    return table(head, rows)


def main(
    steps: Annotated[int, typer.Option(help="Steps to time in each run.")] = 3,
    rounds: Annotated[int, typer.Option(help="Runs of each kind.")] = 3,
    hidden: Annotated[int, typer.Option(help="The model's hidden size.")] = 512,
) -> None:
    """Measure, and write the report."""
    load = os.getloadavg()[0]
    section = step_times(hidden, steps, rounds)
    where = f"{platform.machine()}, {RANKS} cores, load {load:.0f} at the start"
    parts = [
        "# Rehearsals",
        f"`python benchmarks/rehearse.py --steps {steps} --rounds {rounds} --hidden {hidden}` on {where}, "
        f"Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}: p = {RANKS}, m = {MICROBATCHES}, "
        "8 layers, 256 tokens.",
        inspect.cleandoc(step_times.__doc__ or ""),
        section,
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rehearse.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
