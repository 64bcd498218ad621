"""Does a rehearsal predict how long a step takes?

    python -m benchmarks.planner.rehearsals [--steps 3] [--rounds 3] [--hidden 512]

Trains GPTs on two CPU ranks, one thread each, rehearses the same flags, and compares.  Writes
results/rehearse.md; with the defaults in about half an hour on two idle cores.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.measuring import COMMON, MPP, RANKS, call, in_turns, logged_seconds, pretrain, two_cores
from benchmarks.report import RESULTS, Out, Row, publish, table

MICROBATCHES = 8
SCHEDULES = {
    "1f1b": "--pipeline-schedule 1f1b",
    "zb-h1": "--pipeline-schedule zb-h1",
    "v-half": "--pipeline-schedule v-half",
    "v-zb": "--pipeline-schedule v-zb",
    "interleaved": "--pipeline-schedule interleaved",
    "flex": "--pipeline-schedule flex --pipeline-memory-limit 0.9",
}
WARM_UP = 2


def train(flags: list[str], steps: int) -> float:
    """Return the median seconds of the steps of a real run, as Megatron logs them, without the first ones."""
    return median(logged_seconds(pretrain([*flags, "--train-iters", str(WARM_UP + steps)]))[WARM_UP:])


def rehearse(flags: list[str], steps: int) -> float:
    """Return the seconds of a step that the command reports, with both ranks rehearsed at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "numbers.json")
        options = ["--ranks", "all", "--at-once", str(RANKS), "--iterations", str(steps), "--json", str(file)]
        call([*MPP, "rehearse", *options, "--", *flags])
        return float(json.loads(file.read_text(encoding="utf-8"))["step_seconds"])


def step_times(hidden: int, steps: int, rounds: int) -> str:
    """Return a table with the median and the least of all rounds, in seconds of a step."""
    rows: list[Row] = []
    for name, chosen in SCHEDULES.items():
        model = f"--global-batch-size {MICROBATCHES} --hidden-size {hidden} --vocab-size {16 * hidden}"
        flags = [*COMMON, *model.split(), *chosen.split()]
        ways = {"real": partial(train, flags, steps), "rehearsed": partial(rehearse, flags, steps)}
        with two_cores():
            real, rehearsed = in_turns(ways, rounds).values()
        row: list[object] = [name]
        for of in (median, min):
            row += [f"{of(real):.3f}", f"{of(rehearsed):.3f}", f"{of(rehearsed) / of(real) - 1:+.1%}"]
        rows.append((*row, " ".join(f"{seconds:.2f}" for seconds in real)))
        print(*rows[-1], file=sys.stderr, flush=True)
    columns = ("rehearsed", "error")
    return table(("schedule", "real, median", *columns, "real, least", *columns, "real rounds"), rows)


def main(
    out: Out = RESULTS / "rehearse.md",
    steps: Annotated[int, typer.Option(help="Steps to time in each run.")] = 3,
    rounds: Annotated[int, typer.Option(help="Runs of each kind.")] = 3,
    hidden: Annotated[int, typer.Option(help="The model's hidden size.")] = 512,
) -> None:
    """Measure, and write the table."""
    about = (
        f"p = {RANKS}, m = {MICROBATCHES}, 8 layers, 256 tokens. Seconds of a step: medians of each run's "
        "steps; of these the median and the least of all rounds. Real and rehearsed runs take turns. Both "
        "ranks are rehearsed at once, each on a core, so that they share the machine's memory as those of "
        "the real run do. A machine that others use as well has slow moments, which disturb the least of "
        "several rounds least."
    )
    publish(out, "Rehearsals", about, step_times(hidden, steps, rounds))


if __name__ == "__main__":
    typer.run(main)
