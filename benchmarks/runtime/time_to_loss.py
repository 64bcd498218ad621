"""Does PipeDream come to 1F1B's loss sooner?  (two CPU cores)

    python -m benchmarks.runtime.time_to_loss [--samples N] [--bandwidth B] [--rounds N] [--keep FOLDER]

The model, the text and the link are those of ``benchmarks.runtime.slow_links``; all ways of training have two
stages on the same link.  Every way tries the same learning rates and keeps its best one.  How many samples it
takes to a loss does not depend on the machine's load.  How long a sample takes is measured apart, in short
runs of all ways in turns, and is the median over their updates.  Writes results/time_to_loss.md.
"""

import math
import sys
from itertools import pairwise
from statistics import median
from typing import Annotated, NamedTuple

import typer

from benchmarks.report import RESULTS, Keep, Out, Row, kept_in, publish, table
from benchmarks.runtime import slow_links
from benchmarks.runtime.curves import LAST, LAYERS, MICROBATCH, Curve
from benchmarks.runtime.settings import best
from benchmarks.runtime.slow_links import NO_FLUSH, PIPELINE, RANKS, RATES, Bench, batch

SHORT = 160
"""Samples of a run that is timed."""

SYNCHRONOUS = slow_links.WAYS["1f1b"]
TWO_VERSIONS = (*PIPELINE, "--pipeline-schedule", "pipedream-2bw", "--global-batch-size", slow_links.TWO)
MUON = ("--optimizer", "muon", "--muon-nesterov", "--muon-momentum", "0.9")
WAYS: dict[str, tuple[str, ...]] = {
    "1f1b": SYNCHRONOUS,
    "pipedream": NO_FLUSH,
    "pipedream-2bw": TWO_VERSIONS,
    "1f1b, Muon": (*SYNCHRONOUS, *MUON),
    "pipedream, Muon": (*NO_FLUSH, *MUON),
    "pipedream-2bw, Muon": (*TWO_VERSIONS, *MUON),
}
GOALS = {"Adam": "1f1b", "Muon": "1f1b, Muon"}
"""1F1B with each optimizer, to whose last loss all ways are timed."""


class Timed(NamedTuple):
    """A way with its best rate: the losses by update, and the median seconds of an update."""

    flags: tuple[str, ...]
    rate: str
    curve: Curve
    update_seconds: float

    @property
    def sample_seconds(self) -> float:
        """The seconds of a sample."""
        return self.update_seconds / batch(self.flags)

    def samples_to(self, loss: float) -> float:
        """Return the samples until the mean of the last losses is ``loss``; not a number if it never is."""
        return (self.curve.updates_to(loss) or math.nan) * batch(self.flags)

    def seconds_to(self, loss: float) -> float:
        """Return the seconds until then."""
        return self.samples_to(loss) * self.sample_seconds


def measure(bench: Bench, bandwidth: float, rounds: int) -> tuple[str, dict[str, Timed]]:
    """Return the layout of the stages, and the times of each way."""
    _, layout = bench.cut(bandwidth)
    curves = bench.at_all_rates(layout, bandwidth)
    rates = {way: best({rate: curve.last for rate, curve in of.items()}) for way, of in curves.items()}
    updates: dict[str, list[float]] = {way: [] for way in bench.ways}
    short = bench._replace(samples=min(SHORT, bench.samples))
    for number in range(rounds):
        for way, seconds in updates.items():
            curve = short.train(way, layout, rates[way], bandwidth)
            seconds += [after - before for before, after in pairwise(curve.seconds)]
        print(f"round {number + 1} of {rounds} is over", file=sys.stderr, flush=True)
    return layout, {
        way: Timed(flags, rates[way], curves[way][rates[way]], median(updates[way]))
        for way, flags in bench.ways.items()
    }


def rows(timed_ways: dict[str, Timed], goals: dict[str, float]) -> list[Row]:
    """Return the table's rows; the goals are the last losses of 1F1B by optimizer."""
    return [
        (
            way,
            timed.rate,
            batch(timed.flags),
            f"{timed.curve.last:.3f}",
            f"{1e3 * timed.sample_seconds:.1f}",
            *(cell for name, loss in goals.items() for cell in until(loss, timed, timed_ways[GOALS[name]])),
        )
        for way, timed in timed_ways.items()
    ]


def until(loss: float, timed: Timed, stock: Timed) -> tuple[str, str, str]:
    """Return the cells about the way to ``loss``: samples, seconds, and speedup over 1F1B."""
    seconds = timed.seconds_to(loss)
    speedup = stock.seconds_to(loss) / seconds
    return f"{timed.samples_to(loss):.0f}", f"{seconds:.1f}", f"{speedup:.2f}"


def main(
    out: Out = RESULTS / "time_to_loss.md",
    samples: Annotated[int, typer.Option(help="Samples that each run learns from.")] = 800,
    bandwidth: Annotated[float, typer.Option(help="Bytes a second of the link of each rank.")] = 6.4e7,
    rounds: Annotated[int, typer.Option(help="Short runs of each way that are timed.")] = 5,
    keep: Keep = None,
) -> None:
    """Train every way at every rate, time the best ones in turns, and write the page."""
    with kept_in(keep) as folder:
        layout, timed_ways = measure(Bench(folder, samples, WAYS), bandwidth, rounds)
    goals = {name: timed_ways[way].curve.last for name, way in GOALS.items()}
    head = ["way", "rate", "samples an update", "last loss", "ms a sample"]
    for name, loss in goals.items():
        head += [f"samples to {loss:.3f}", "seconds", f"speedup over 1F1B with {name}"]
    publish(
        out,
        "Time to 1F1B's loss",
        f"A GPT of {LAYERS} layers learns from {samples:,} samples of text on {RANKS} ranks, "
        f"{MICROBATCH} a microbatch, in the stages `{layout}`, on links of "
        f"{slow_links.megabytes(bandwidth)}; [slow_links.md](slow_links.md) describes both. Without a note "
        "the optimizer is Adam. Muon updates the matrices of the layers, with Nesterov's momentum of 0.9. "
        f"Each way has the better of the rates {', '.join(RATES)}. A last loss is "
        f"the mean over the last {100 * LAST:.0f}% of the samples, and losses on the way are means of as "
        f"many. The time of a sample is the median over the updates of {rounds} short runs of each way, in "
        "turns with the others, and seconds are samples x this time. All ways learn from the same samples, "
        "with which their losses rise and fall, so that a mean on the way may be below the last loss. nan: a "
        "way does not come to that loss.",
        table(head, rows(timed_ways, goals)),
    )


if __name__ == "__main__":
    typer.run(main)
