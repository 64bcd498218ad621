"""Does a rehearsal tell how long a step takes?

    python benchmarks/rehearse.py [--steps 8] [--rounds 2]

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
SIZES = {
    "hidden 256": "--hidden-size 256 --vocab-size 4000",
    "hidden 512": "--hidden-size 512 --vocab-size 8000",
}
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


def rehearse(flags: list[str], steps: int, at_once: int) -> float:
    """Seconds of a step as the command tells them."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told.json")
        mpp = [
            sys.executable,
            "-c",
            "from megatron_pp_ext.cli import app; app()",
            "rehearse",
            "--ranks",
            "all",
        ]
        options = ["--at-once", str(at_once), "--iterations", str(steps), "--json", str(told)]
        call([*mpp, *options, "--", *flags])
        return float(json.loads(told.read_text())["step_seconds"])


def step_times(steps: int, rounds: int) -> str:
    """Seconds of a step, medians over all rounds; real and rehearsed runs take turns.

    "At once": both ranks are rehearsed at the same time, each on a core, so that they share the machine's
    memory as those of the real run do.  "Alone": one after the other.
    """
    rows: list[Row] = []
    for size, shape in SIZES.items():
        for name, chosen in SCHEDULES.items():
            batch = f"--global-batch-size {MICROBATCHES}"
            flags = [*COMMON, *batch.split(), *shape.split(), *chosen.split()]
            real, together, alone = [], [], []
            with two_cores():
                for _ in range(rounds):
                    real += train(flags, steps)
                    together.append(rehearse(flags, steps, RANKS))
                    alone.append(rehearse(flags, steps, 1))
            truth = median(real)
            errors = (
                f"{seconds:.3f} ({seconds / truth - 1:+.1%})" for seconds in (median(together), median(alone))
            )
            rows.append((size, name, f"{truth:.3f}", f"{min(real):.3f} to {max(real):.3f}", *errors))
            print(*rows[-1], file=sys.stderr, flush=True)
    head = ("model", "schedule", "real", "from, to", "rehearsed at once (error)", "rehearsed alone (error)")
    return table(head, rows)


def main(
    steps: Annotated[int, typer.Option(help="Steps to time in each run.")] = 8,
    rounds: Annotated[int, typer.Option(help="Runs of each kind.")] = 2,
) -> None:
    """Measure, and write the report."""
    load = os.getloadavg()[0]
    section = step_times(steps, rounds)
    where = f"{platform.machine()}, {RANKS} cores, load {load:.0f} at the start"
    parts = [
        "# Rehearsals",
        f"`python benchmarks/rehearse.py --steps {steps} --rounds {rounds}` on {where}, Python "
        f"{platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}: p = {RANKS}, m = {MICROBATCHES}, "
        "8 layers, 256 tokens.",
        inspect.cleandoc(step_times.__doc__ or ""),
        section,
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rehearse.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
