"""Does a correction of late gradients bring PipeDream to 1F1B's loss?  (two CPU cores)

    python -m benchmarks.runtime.delay_correction [--samples N] [--tuned FILE]

A small GPT learns the sources of Python's standard library.  First, every way of training tries the same
learning rates in a single process that keeps all versions of the weights (``tests.support.delayed``), which
the tests hold equal to the pipelines.  Then the best of each runs on real ranks, for its seconds.  Writes
results/delay_correction.md and .png.
"""

import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Annotated, NamedTuple

import torch
import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from megatron_pp_ext import cpu
from megatron_pp_ext.integration import install
from megatron_pp_ext.text_data import VOCAB_SIZE, prepare
from megatron_pp_ext.view import figure
from tests.support import training
from tests.support.delayed import Reference
from tests.support.ranks import run_ranks

LAYERS, MICROBATCH, INTERVAL = 4, 4, 4
RATES = ("5e-4", "1e-3", "2e-3")
MODEL = (
    f"--untie-embeddings-and-output-weights --num-layers {LAYERS} --hidden-size 64 --num-attention-heads 4 "
    f"--seq-length 64 --max-position-embeddings 64 --micro-batch-size {MICROBATCH} --attention-dropout 0 "
    "--hidden-dropout 0 --lr-decay-style constant --clip-grad 0 --eval-iters 0 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --split 100,0,0 --eval-interval 100000 "
    "--log-interval 100000 --distributed-timeout-minutes 5"
).split()
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "error-feedback": (),
    "nesterov": ("--adam-beta1", "0.99"),  # the paper's
}
"""The flags that go with each correction."""
LAST = 0.15
"""The part of the samples over which a run's last losses are averaged."""


_ON_RANKS = """## The best rate of 1f1b and of the best other way, on real ranks

Ranks share two cores here, so seconds say little about a cluster. Losses are means of as many samples."""


class Way(NamedTuple):
    """How to train: the rule of the weights (see ``Reference``; None with a flush), and the correction."""

    rule: str | None
    stages: int
    interval: int
    correction: str | None = None

    @property
    def name(self) -> str:
        """The schedule with its correction."""
        schedule = {None: "1f1b", "previous": "pipedream-2bw", "latest": "pipedream"}[self.rule]
        return f"{schedule}, {self.correction}" if self.correction else schedule

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of a single process and of a pipeline alike."""
        batch = str(MICROBATCH * self.interval)
        return ("--global-batch-size", batch, *(CORRECTIONS[self.correction] if self.correction else ()))

    @property
    def pipeline(self) -> tuple[str, ...]:
        """The flags of a pipeline alone."""
        schedule = "pipedream-2bw" if self.rule == "previous" else "pipedream"
        flags = ("--pipeline-schedule", schedule) if self.rule else ()
        correction = ("--pipeline-delay-correction", self.correction) if self.correction else ()
        return ("--pipeline-model-parallel-size", str(self.stages), *flags, *correction)


class Case(NamedTuple):
    """What is compared: all ways of training with as many microbatches an update and the same delays."""

    title: str
    rule: str
    stages: int
    interval: int

    @property
    def ways(self) -> list[Way]:
        """1F1B, the schedule, and the schedule with each correction."""
        without = Way(None, self.stages, self.interval), Way(self.rule, self.stages, self.interval)
        return [*without, *(without[1]._replace(correction=name) for name in CORRECTIONS)]


CASES = (
    Case(f"PipeDream-2BW, {INTERVAL} microbatches an update, 2 ranks", "previous", 2, INTERVAL),
    Case(f"PipeDream-2BW, {INTERVAL} microbatches an update, 4 ranks", "previous", 4, INTERVAL),
    Case("PipeDream, an update every microbatch, 2 ranks", "latest", 2, 1),
    Case("PipeDream, an update every microbatch, 4 ranks", "latest", 4, 1),
)


class Curve(NamedTuple):
    """The loss of every update, and the seconds after which it was done."""

    losses: list[float]
    seconds: list[float]

    @property
    def last(self) -> float:
        """The mean loss of the last samples."""
        return mean(self.losses[-max(1, round(LAST * len(self.losses))) :])

    @property
    def smooth(self) -> list[float]:
        """After every update the mean of as many losses, of fewer at the start."""
        width = max(1, round(LAST * len(self.losses)))
        return [mean(self.losses[max(0, end - width) : end]) for end in range(1, len(self.losses) + 1)]

    def seconds_to(self, loss: float) -> float | None:
        """Return the seconds until the mean of as many losses was ``loss``; None if it never was."""
        width = max(1, round(LAST * len(self.losses)))
        for end in range(width, len(self.losses) + 1):
            if mean(self.losses[end - width : end]) <= loss:
                return self.seconds[end - 1]
        return None


def train(rank: int, argv: list[str], reference: tuple | None) -> Curve:
    """Train as one rank, or as the single process that follows ``reference``."""
    torch.set_num_threads(1)
    install()
    ends: list[float] = []
    if reference:
        Reference(*reference).take_over()
    step = training.training.train_step

    def timed_step(*args, **kwargs):
        if not ends:
            ends.append(time.perf_counter())
        result = step(*args, **kwargs)
        ends.append(time.perf_counter())
        return result

    training.training.train_step = timed_step
    losses = training._train(rank, argv, training.initialize_by_layer, None).losses
    return Curve(losses, [end - ends[0] for end in ends[1:]])


def learn(data: str, samples: int, way: Way, rate: str, on_ranks: bool = False) -> Curve:
    """Train ``way`` with the learning ``rate``, in a single process or ``on_ranks``."""
    steps = samples // (MICROBATCH * way.interval)
    flags = [*MODEL, "--data-path", data, "--train-iters", str(steps), "--lr", rate, *way.flags]
    straight = "-".join("1" * way.stages)
    reference = (straight, way.interval, way.rule, way.correction) if way.rule else None
    if on_ranks:
        return run_ranks(train, way.stages, cpu.with_cpu_flags([*flags, *way.pipeline]), None)[-1]
    return run_ranks(train, 1, cpu.with_cpu_flags(flags), reference)[0]


def alone(way: Way) -> Way:
    """Return the way that is the same in a single process: flushes, and 2BW, do not depend on the stages."""
    return way if way.rule == "latest" else way._replace(stages=2)


def tune(data: str, samples: int) -> dict[Way, dict[str, float]]:
    """Return the last loss of every way with every rate, by single processes, one a core."""
    runs = list(product(dict.fromkeys(alone(way) for case in CASES for way in case.ways), RATES))
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        curves = pool.map(partial(learn, data, samples), *zip(*runs, strict=True))
        found: dict[Way, dict[str, float]] = {}
        for (way, rate), curve in zip(runs, curves, strict=True):
            found.setdefault(way, {})[rate] = curve.last
            print(f"{way.name}, {way.stages} stages, {rate}: {curve.last:.3f}", file=sys.stderr, flush=True)
    return found


def tuned_once(file: Path | None, data: str, samples: int) -> dict[Way, dict[str, float]]:
    """Tune, or read from ``file`` what an earlier run has written there."""
    if file and file.exists():
        return {Way(*way): losses for way, losses in json.loads(file.read_text())}
    found = tune(data, samples)
    if file:
        file.write_text(json.dumps(list(found.items())))
    return found


def best(losses: dict[str, float]) -> str:
    """Return the rate with the lowest loss."""
    return min(losses, key=losses.__getitem__)


def cells(losses: dict[str, float]) -> list[str]:
    """Return the losses for a table's row, the best in bold."""
    return [f"**{loss:.3f}**" if rate == best(losses) else f"{loss:.3f}" for rate, loss in losses.items()]


def grid(tuned: dict[Way, dict[str, float]]) -> str:
    """Return the table of all last losses, the best of each row in bold."""
    rows: list[Row] = []
    for case in CASES:
        for way in case.ways:
            losses = tuned[alone(way)]
            more = min(losses.values()) / min(tuned[alone(case.ways[0])].values()) - 1
            rows.append((case.title, way.name, *cells(losses), f"{100 * more:+.1f}%" if way.rule else ""))
    return table(("case", "schedule", *RATES, "best against 1f1b's best"), rows)


def confirm(data: str, samples: int, tuned: dict[Way, dict[str, float]], picture: Path) -> str:
    """Run 1F1B and the best of the others on real ranks; return the table, and draw them."""
    rows: list[Row] = []
    drawn = figure.new_figure(11, 7)
    axes = drawn.subplots(2, 2)
    for case, ax in zip(CASES, axes.flat, strict=True):
        stock, *others = case.ways
        winner = min(others, key=lambda way: min(tuned[alone(way)].values()))
        curves = {way: learn(data, samples, way, best(tuned[alone(way)]), True) for way in (stock, winner)}
        target = curves[stock].last
        for way, curve in curves.items():
            reached = curve.seconds_to(1.01 * target)
            rows.append(
                (
                    case.title,
                    way.name,
                    best(tuned[alone(way)]),
                    f"{curve.last:.3f}",
                    f"{100 * (curve.last / target - 1):+.1f}%" if way.rule else "",
                    f"{curve.seconds[-1]:.1f}",
                    "never" if reached is None else f"{reached:.1f}",
                )
            )
            ax.plot(curve.seconds, curve.smooth, "-" if way.rule else "--", label=way.name)
        ax.set(title=case.title, xlabel="seconds", ylabel="training loss")
        ax.legend(frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
    drawn.tight_layout()
    figure.save(drawn, picture)
    head = (
        "case",
        "schedule",
        "rate",
        "last loss",
        "against 1f1b",
        "seconds",
        "seconds to 1f1b's loss + 1%",
    )
    return table(head, rows)


def main(
    out: Out = RESULTS / "delay_correction.md",
    samples: Annotated[int, typer.Option(help="Samples that each run learns from.")] = 2400,
    tuned: Annotated[
        Path | None, typer.Option(help="Keeps the tuning's losses: a later run goes on with them.")
    ] = None,
    on_ranks: Annotated[
        bool, typer.Option("--ranks/--no-ranks", help="Run the best of each on real ranks, too.")
    ] = True,
) -> None:
    """Tune, confirm, and write the page; the picture shows what ran on real ranks."""
    picture = RESULTS / "delay_correction.png" if str(out) == "-" else out.with_suffix(".png")
    with tempfile.TemporaryDirectory() as folder:
        prepare(None, Path(folder) / "text")
        losses = tuned_once(tuned, f"{folder}/text", samples)
        confirmed = confirm(f"{folder}/text", samples, losses, picture) if on_ranks else ""
    publish(
        out,
        "Corrections of late gradients",
        f"A GPT of {LAYERS} layers (hidden size 64) learns from {samples:,} samples of 64 bytes of text, "
        f"{MICROBATCH} a microbatch, with Adam at a constant rate; nesterov with beta1 0.99, the others with "
        f"0.9. A last loss is the mean over the last {100 * LAST:.0f}% of the samples.",
        "## The same learning rates for all, in a single process that keeps all versions of the weights",
        grid(losses),
        *((_ON_RANKS, confirmed, f"See {picture.name}.") if on_ranks else ()),
    )


if __name__ == "__main__":
    typer.run(main)
