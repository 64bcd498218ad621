"""Does a correction of late gradients bring PipeDream to 1F1B's loss?  (one CPU core, about 90 minutes)

    python -m benchmarks.runtime.delay_correction [--samples N] [--keep FOLDER]

A small GPT learns the sources of Python's standard library with Adam, or with Muon for its matrices.  Every
way of training searches the same learning rates and momenta in the same manner, in a single process that
keeps all versions of the weights (``tests.support.delayed``), which the tests hold equal to the pipelines.
The best settings then run with more seeds.  Writes results/delay_correction.md and .png.
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Annotated, NamedTuple

import typer

from benchmarks.report import RESULTS, Keep, Out, Row, kept_in, picture_of, publish, table
from benchmarks.runtime.curves import LAST, LAYERS, MICROBATCH, learning_curve, model
from benchmarks.runtime.settings import MOMENTA, RATES, Settings, search
from megatron_pp_ext import cpu
from megatron_pp_ext.text_data import prepare
from megatron_pp_ext.view import figure
from tests.support.ranks import run_ranks

FIRST, NESTEROVS_FIRST = Settings("1e-3", "0.9"), Settings("1e-3", "0.99")
"""Where the search begins; 0.99 is the value of Nesterov's paper."""
SEEDS = (1234, 1, 2)
"""The first is Megatron's own, with which the search is done."""
CORRECTIONS = {"adam": ("error-feedback", "nesterov"), "muon": ("error-feedback",)}


class Way(NamedTuple):
    """How to train: the rule of the weights (see ``Reference``; None with a flush), correction, optimizer."""

    rule: str | None
    stages: int
    interval: int
    correction: str | None = None
    optimizer: str = "adam"

    @property
    def name(self) -> str:
        """The schedule with its correction."""
        schedule = {None: "1f1b", "previous": "pipedream-2bw", "latest": "pipedream"}[self.rule]
        return f"{schedule}, {self.correction}" if self.correction else schedule

    def flags(self, settings: Settings) -> list[str]:
        """Return Megatron's flags of the optimizer; Muon has its author's momentum, Nesterov's."""
        momentum = ["--adam-beta1", settings.momentum]
        if self.optimizer == "muon":
            momentum = ["--optimizer", "muon", "--muon-nesterov", "--muon-momentum", settings.momentum]
        return ["--lr", settings.rate, *momentum]


class Case(NamedTuple):
    """What is compared: all ways of training with as many microbatches an update and the same delays."""

    title: str
    rule: str
    stages: int
    interval: int

    @property
    def ways(self) -> list[Way]:
        """1F1B, the schedule, and the schedule with each correction, by each optimizer."""
        return [way for name, corrections in CORRECTIONS.items() for way in self._ways(name, corrections)]

    def _ways(self, optimizer: str, corrections: tuple[str, ...]) -> list[Way]:
        without = Way(self.rule, self.stages, self.interval, None, optimizer)
        corrected = (without._replace(correction=name) for name in corrections)
        return [Way(None, 1, self.interval, None, optimizer), without, *corrected]


CASES = (
    Case("PipeDream, an update every microbatch, 2 ranks", "latest", 2, 1),
    Case("PipeDream, an update every microbatch, 4 ranks", "latest", 4, 1),
    Case("PipeDream-2BW, 2 microbatches an update, 2 ranks", "previous", 2, 2),
    Case("PipeDream-2BW, 4 microbatches an update, 2 or 4 ranks", "previous", 2, 4),
)


class Bench:
    """The last losses of single processes on ``samples`` of a text; ``folder`` keeps both."""

    def __init__(self, samples: int, folder: Path) -> None:
        prepare(None, folder / "text")
        self._data, self._samples = f"{folder}/text", samples
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
            print(f"{way}, {settings}, {seed}: {loss:.3f}", file=sys.stderr)
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
        flags = [*model(64, 64), "--data-path", self._data, "--train-iters", str(self._samples // batch)]
        flags += ["--global-batch-size", str(batch), "--seed", str(seed), *way.flags(settings)]
        straight = "-".join("1" * way.stages)
        reference = (straight, way.interval, way.rule, way.correction) if way.rule else None
        return run_ranks(learning_curve, 1, cpu.with_cpu_flags(flags), reference)[0].last


class Reached(NamedTuple):
    """What a way reached with its best settings: the last losses, one a seed, and their mean.

    ``percents`` says how far the mean is from 1F1B's, by the optimizer of 1F1B.
    """

    settings: Settings
    losses: list[float]
    percents: dict[str, float]


def measure(bench: Bench, case: Case) -> dict[Way, Reached]:
    """Return what all ways of ``case`` reach."""
    best = {way: bench.best(way) for way in case.ways}
    losses = {way: [bench.loss(way, best[way], seed) for seed in SEEDS] for way in case.ways}
    stock = {way.optimizer: mean(losses[way]) for way in case.ways if not way.rule}
    return {
        way: Reached(
            best[way],
            losses[way],
            {name: 100 * (mean(losses[way]) / loss - 1) for name, loss in stock.items()},
        )
        for way in case.ways
    }


def row(bench: Bench, case: Case, way: Way, reached: Reached) -> Row:
    """Return the row of a way in the table; Adam is not compared with 1F1B's Muon."""
    settings, losses, percents = reached
    is_compared = {"adam": way.rule or way.optimizer != "adam", "muon": way.rule and way.optimizer == "muon"}
    return (
        case.title,
        way.optimizer,
        way.name,
        settings.rate,
        f"{settings.momentum} (edge)" if settings.at_the_edge else settings.momentum,
        bench.tried(way),
        " ".join(f"{loss:.3f}" for loss in losses),
        *(f"{percents[name]:+.1f}%" if is_compared[name] else "" for name in CORRECTIONS),
    )


def draw(found: dict[Case, dict[Way, Reached]], path: Path) -> None:
    """Draw how far each way is from 1F1B with Adam, and from 1F1B with the same optimizer."""
    picture = figure.new_figure(15, 4.8)
    panels = picture.subplots(1, 2, sharey=True)
    for axes, title in zip(panels, ("1F1B's with Adam", "1F1B's with the same optimizer"), strict=True):
        for place, way in enumerate(way for way in CASES[0].ways if way.rule):
            percents = [
                reached.percents["adam" if axes is panels[0] else one.optimizer]
                for ways in found.values()
                for one, reached in ways.items()
                if one.rule and (one.optimizer, one.correction) == (way.optimizer, way.correction)
            ]
            label = f"{way.optimizer.title()}, {way.correction or 'no correction'}"
            left = [case + (place - 2) / 6 for case in range(len(found))]
            bars = axes.bar(left, percents, 0.15, label=label)
            axes.bar_label(bars, fmt="%+.1f", padding=2, fontsize=6)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.axhline(1, color=figure.GREY, linestyle=":")
        axes.set_xticks(range(len(found)), [case.title.replace(", ", ",\n") for case in found], fontsize=7)
        axes.set(title=f"against {title}", ylabel="last loss, mean of three seeds, %")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    picture.tight_layout()
    figure.save(picture, path)


def main(
    out: Out = RESULTS / "delay_correction.md",
    samples: Annotated[int, typer.Option(help="Samples that each run learns from.")] = 2400,
    keep: Keep = None,
) -> None:
    """Search the settings of all ways, and write the page and the picture."""
    picture = picture_of(out, "delay_correction")
    with kept_in(keep) as folder:
        bench = Bench(samples, folder)
        known = len(bench)
        found = {case: measure(bench, case) for case in CASES}
    draw(found, picture)
    head = (
        *("case", "optimizer", "schedule", "rate", "momentum", "settings tried", "last losses"),
        *("mean against 1f1b with Adam", "mean against 1f1b with Muon"),
    )
    publish(
        out,
        "Corrections of late gradients",
        f"A GPT of {LAYERS} layers (hidden size 64) learns from {samples:,} samples of 64 bytes of text, "
        f"{MICROBATCH} a microbatch, at a constant rate, in a single process that keeps all versions of the "
        "weights. Muon is Megatron's, with Nesterov's momentum and otherwise its own defaults: it updates "
        "the matrices of the layers, and Adam the rest at the same rate. A last loss is the mean over the "
        f"last {100 * LAST:.0f}% of the samples. {known} of the {len(bench)} runs were made by earlier "
        "commands, which kept their losses.",
        f"Each way starts at rate {FIRST.rate} and momentum {FIRST.momentum} "
        f"({NESTEROVS_FIRST.momentum} for nesterov): beta1 of Adam, or Muon's own. It goes downhill until "
        "none of the eight neighbours, with the next rate or the next momentum or both, is lower. The rates "
        f"are {', '.join(RATES)}, the momenta {', '.join(MOMENTA)}; (edge) marks a choice at an end of these "
        "lines, beyond which the loss may be lower still. The search uses the first seed; what it finds runs "
        f"with the seeds {', '.join(map(str, SEEDS))}. The last columns compare the means of the three.",
        table(
            head,
            [row(bench, case, way, reached) for case, ways in found.items() for way, reached in ways.items()],
        ),
        f"![How far each way is from 1F1B's loss]({picture.name})",
    )


if __name__ == "__main__":
    typer.run(main)
