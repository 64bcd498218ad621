"""Does a correction of late gradients bring PipeDream to 1F1B's loss?  (one CPU core, about 23 minutes)

    python -m benchmarks.runtime.delay_correction [--samples N] [--keep FOLDER]

A small GPT learns the sources of Python's standard library.  Every way of training searches the same
learning rates and values of beta1 in the same manner, in a single process that keeps all versions of the
weights (``tests.support.delayed``), which the tests hold equal to the pipelines.  The best settings then run
with more seeds.  Writes results/delay_correction.md and .png.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Annotated, NamedTuple

import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.runtime.curves import LAST, learning_curve
from benchmarks.runtime.settings import BETAS, RATES, Settings, search
from megatron_pp_ext import cpu
from megatron_pp_ext.text_data import VOCAB_SIZE, prepare
from megatron_pp_ext.view import figure
from tests.support.ranks import run_ranks

LAYERS, MICROBATCH, INTERVAL = 4, 4, 4
FIRST, NESTEROVS_FIRST = Settings("1e-3", "0.9"), Settings("1e-3", "0.99")
"""Where the search begins; 0.99 is the value of Nesterov's paper."""
SEEDS = (1234, 1, 2)
"""The first is Megatron's own, with which the search is done."""
CORRECTIONS = ("error-feedback", "nesterov")
MODEL = (
    f"--untie-embeddings-and-output-weights --num-layers {LAYERS} --hidden-size 64 --num-attention-heads 4 "
    f"--seq-length 64 --max-position-embeddings 64 --micro-batch-size {MICROBATCH} --attention-dropout 0 "
    "--hidden-dropout 0 --lr-decay-style constant --clip-grad 0 --eval-iters 0 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --split 100,0,0 --eval-interval 100000 "
    "--log-interval 100000 --distributed-timeout-minutes 5"
).split()


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


class Case(NamedTuple):
    """What is compared: all ways of training with as many microbatches an update and the same delays."""

    title: str
    rule: str
    stages: int
    interval: int

    @property
    def ways(self) -> list[Way]:
        """1F1B, the schedule, and the schedule with each correction."""
        without = Way(self.rule, self.stages, self.interval)
        corrected = (without._replace(correction=name) for name in CORRECTIONS)
        return [Way(None, 1, self.interval), without, *corrected]


CASES = (
    Case("PipeDream, an update every microbatch, 2 ranks", "latest", 2, 1),
    Case("PipeDream, an update every microbatch, 4 ranks", "latest", 4, 1),
    Case(f"PipeDream-2BW, {INTERVAL} microbatches an update, 2 or 4 ranks", "previous", 2, INTERVAL),
)


class Bench:
    """The last losses of single processes on ``samples`` of ``data``; ``folder`` keeps them."""

    def __init__(self, data: str, samples: int, folder: Path) -> None:
        self._data, self._samples = data, samples
        self._file = folder / f"{samples}.json"
        known = json.loads(self._file.read_text()) if self._file.exists() else []
        self._losses = {(Way(*way), Settings(*settings), seed): loss for way, settings, seed, loss in known}

    def __len__(self) -> int:
        """Return how many losses are known."""
        return len(self._losses)

    def loss(self, way: Way, settings: Settings, seed: int = SEEDS[0]) -> float:
        """Return the last loss of ``way`` with ``settings``."""
        key = way, settings, seed
        if key not in self._losses:
            loss = self._losses[key] = self._learn(*key)
            print(f"{way.name}, {way.stages} stages, {settings}, {seed}: {loss:.3f}", file=sys.stderr)
            self._file.write_text(json.dumps([(*key, loss) for key, loss in self._losses.items()]))
        return self._losses[key]

    def best(self, way: Way) -> Settings:
        """Return the best settings of ``way``."""
        first = NESTEROVS_FIRST if way.correction == "nesterov" else FIRST
        return search(first, lambda settings: self.loss(way, settings))

    def tried(self, way: Way) -> int:
        """Return how many settings were tried for ``way``."""
        return len({settings for one, settings, _ in self._losses if one == way})

    def _learn(self, way: Way, settings: Settings, seed: int) -> float:
        batch = MICROBATCH * way.interval
        flags = [*MODEL, "--data-path", self._data, "--train-iters", str(self._samples // batch)]
        flags += ["--global-batch-size", str(batch), "--seed", str(seed)]
        flags += ["--lr", settings.rate, "--adam-beta1", settings.beta]
        straight = "-".join("1" * way.stages)
        reference = (straight, way.interval, way.rule, way.correction) if way.rule else None
        return run_ranks(learning_curve, 1, cpu.with_cpu_flags(flags), reference)[0].last


class Reached(NamedTuple):
    """What a way reached with its best settings: the last losses, one a seed, and their mean against 1F1B."""

    settings: Settings
    losses: list[float]
    percent: float


def measure(bench: Bench, case: Case) -> dict[Way, Reached]:
    """Return what all ways of ``case`` reach."""
    best = {way: bench.best(way) for way in case.ways}
    losses = {way: [bench.loss(way, best[way], seed) for seed in SEEDS] for way in case.ways}
    stock = mean(losses[case.ways[0]])
    return {way: Reached(best[way], losses[way], 100 * (mean(losses[way]) / stock - 1)) for way in case.ways}


def row(bench: Bench, case: Case, way: Way, reached: Reached) -> Row:
    """Return the row of a way in the table."""
    settings, losses, percent = reached
    return (
        case.title,
        way.name,
        settings.rate,
        f"{settings.beta} (edge)" if settings.at_the_edge else settings.beta,
        bench.tried(way),
        " ".join(f"{loss:.3f}" for loss in losses),
        f"{percent:+.1f}%" if way.rule else "",
    )


def draw(found: dict[Case, dict[Way, Reached]], path: Path) -> None:
    """Draw how far each way is from 1F1B, which is the line at zero."""
    picture = figure.new_figure(9, 4.2)
    axes = picture.subplots()
    names = (None, *CORRECTIONS)
    for place, name in enumerate(names):
        percents = [
            reached.percent
            for ways in found.values()
            for way, reached in ways.items()
            if way.rule and way.correction == name
        ]
        left = [case + (place - 1) / 4 for case in range(len(found))]
        bars = axes.bar(left, percents, 0.22, label=name or "no correction")
        axes.bar_label(bars, fmt="%+.1f%%", padding=2, fontsize=8)
    axes.axhline(0, color="black", linewidth=0.8, label="1F1B")
    axes.axhline(1, color=figure.GREY, linestyle=":", label="1F1B + 1%")
    axes.set_xticks(range(len(found)), [case.title.replace(", ", ",\n") for case in found], fontsize=8)
    axes.set(ylabel="last loss against 1F1B's, mean of three seeds, %")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    picture.tight_layout()
    figure.save(picture, path)


def main(
    out: Out = RESULTS / "delay_correction.md",
    samples: Annotated[int, typer.Option(help="Samples that each run learns from.")] = 2400,
    keep: Annotated[
        Path | None, typer.Option(help="A folder that keeps the losses: a later command goes on with them.")
    ] = None,
) -> None:
    """Search the settings of all ways, and write the page and the picture."""
    picture = RESULTS / "delay_correction.png" if str(out) == "-" else out.with_suffix(".png")
    if keep:
        keep.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        prepare(None, Path(folder) / "text")
        bench = Bench(f"{folder}/text", samples, keep or Path(folder))
        known = len(bench)
        found = {case: measure(bench, case) for case in CASES}
    draw(found, picture)
    head = ("case", "schedule", "rate", "beta1", "settings tried", "last losses", "mean against 1f1b")
    publish(
        out,
        "Corrections of late gradients",
        f"A GPT of {LAYERS} layers (hidden size 64) learns from {samples:,} samples of 64 bytes of text, "
        f"{MICROBATCH} a microbatch, with Adam at a constant rate, in a single process that keeps all "
        f"versions of the weights. A last loss is the mean over the last {100 * LAST:.0f}% of the samples. "
        f"{known} of the {len(bench)} runs were made by earlier commands, which kept their losses.",
        f"Each way starts at rate {FIRST.rate} and beta1 {FIRST.beta} ({NESTEROVS_FIRST.beta} for nesterov) "
        "and goes downhill, first along the rates and then along the values of beta1, until neither "
        f"neighbour is lower. The rates are {', '.join(RATES)}, the values of beta1 {', '.join(BETAS)}; "
        "(edge) marks a choice at an end of these lines, beyond which the loss may be lower still. The "
        f"search uses the first seed; what it finds runs with the seeds {', '.join(map(str, SEEDS))}. The "
        "last column compares the means of the three.",
        table(
            head,
            [row(bench, case, way, reached) for case, ways in found.items() for way, reached in ways.items()],
        ),
        f"![How far each way is from 1F1B's loss]({picture.name})",
    )


if __name__ == "__main__":
    typer.run(main)
