"""How long does a model take to a loss on slow links: data parallelism, 1F1B, PipeDream?  (two CPU cores)

    python -m benchmarks.runtime.slow_links [--samples N] [--bandwidths B,B] [--keep FOLDER]

A GPT with wide layers and short sequences, whose weights are many times as large as what crosses a cut of it,
learns the sources of Python's standard library on two ranks.  Computations are real.  What a rank sends goes
through a link that lets so many bytes a second pass.  Every way of training tries the same learning rates on
the fastest link and keeps its best one on the others.  The partitioner is asked for a cut for each link.
Writes results/slow_links.md and .png.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from tests.support.ranks import run_ranks

# isort: split
import torch
import torch.distributed as dist
import typer

from benchmarks.report import RESULTS, Keep, Out, Row, kept_in, picture_of, publish, table
from benchmarks.runtime.curves import LAST, LAYERS, MICROBATCH, Curve, learning_curve, model
from benchmarks.runtime.machine import sleep_precisely
from benchmarks.runtime.settings import best, cells
from megatron_pp_ext import cpu
from megatron_pp_ext.pipedream.partition.partitioner import layout_of, partition
from megatron_pp_ext.pipedream.partition.recurrence import Level
from megatron_pp_ext.schedule.formats.profile import Profile, read
from megatron_pp_ext.text_data import prepare
from megatron_pp_ext.view import figure

RANKS, HIDDEN, TOKENS = 2, 256, 32
RATES = ("5e-4", "1e-3")
BANDWIDTHS = "1e10,6.4e7"
"""Bytes a second, the fastest link first."""

DATA_PARALLEL = "data parallelism"
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "500000")
HALF, ONE, TWO = (str(MICROBATCH * parts // 2) for parts in (1, 2, 4))
PIPELINE = ("--pipeline-model-parallel-size", str(RANKS))
NO_FLUSH = (*PIPELINE, "--pipeline-schedule", "pipedream", "--global-batch-size", ONE)
WAYS: dict[str, tuple[str, ...]] = {
    f"{DATA_PARALLEL}, {ONE} a rank": (*OVERLAP, "--global-batch-size", TWO),
    f"{DATA_PARALLEL}, {HALF} a rank": (*OVERLAP, "--global-batch-size", ONE, "--micro-batch-size", HALF),
    "1f1b": (*PIPELINE, "--pipeline-schedule", "1f1b", "--global-batch-size", TWO),
    "pipedream": NO_FLUSH,
}
"""How to train.  Data parallelism has 1F1B's batch, or PipeDream's."""


class Arrival:
    """A transfer that a link lets pass later, in the place of torch's ``Work``."""

    def __init__(self, started: Future[dist.Work]) -> None:
        self._started = started

    def is_completed(self) -> bool:
        """Return whether the transfer is over."""
        return self._started.done() and self._started.result().is_completed()

    def wait(self, *timeout: Any) -> bool:
        """Wait until the transfer is over."""
        return self._started.result().wait(*timeout)


class Link:
    """The link of this rank: it sends ``bandwidth`` bytes a second, and receives as much at the same time.

    A transfer begins when those before it are over, and takes its bytes / ``bandwidth``.  A thread sleeps so
    long and then lets gloo do the transfer, while the rank computes on unless it waits for the transfer.
    """

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth, self._free_at = bandwidth, 0.0
        self._transfers = ThreadPoolExecutor(1)

    def install(self) -> None:
        """Throttle the messages and the all-reduces of this process."""
        group: Any = dist.ProcessGroup
        group.send = self._throttled(group.send, lambda ranks: 1)
        for name in ("allreduce", "allreduce_coalesced"):
            setattr(group, name, self._throttled(getattr(group, name), ring_share))

    def _throttled(self, transfer: Callable, share: Callable[[int], float]) -> Callable:
        def later(group: dist.ProcessGroup, tensors: Any, *args: Any) -> Arrival:
            size = sum(tensor.nbytes for tensor in tensors) * share(group.size())
            started = partial(transfer, group, tensors, *args)
            return Arrival(self._transfers.submit(self._pass, time.perf_counter(), size, started))

        return later

    def _pass(self, now: float, size: float, transfer: Callable[[], dist.Work]) -> dist.Work:
        self._free_at = max(self._free_at, now) + size / self._bandwidth
        time.sleep(max(0.0, self._free_at - time.perf_counter()))
        return transfer()


def ring_share(ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce, for each byte of the tensors."""
    return 2 * (ranks - 1) / ranks


def train(rank: int, argv: list[str], bandwidth: float) -> Curve:
    """Train as one rank whose link has ``bandwidth``."""
    sleep_precisely()
    # The first backward of a process imports for a second.
    torch.ones(1, requires_grad=True).sum().backward()
    Link(bandwidth).install()
    return learning_curve(rank, argv, None)


class Bench(NamedTuple):
    """The common state of all runs; ``folder`` has the text, and keeps the profile and the curves."""

    folder: Path
    samples: int
    ways: dict[str, tuple[str, ...]] = WAYS

    def learn(self, way: str, layout: str, rate: str, bandwidth: float) -> Curve:
        """Train, or read the curve of an earlier run; pipelines have the stages of ``layout``."""
        file = self.folder / f"{way}, {rate}, {bandwidth:g}, {self.samples}.json"
        if not file.exists():
            file.write_text(json.dumps(self.train(way, layout, rate, bandwidth)))
        curve = Curve(*json.loads(file.read_text()))
        print(f"{file.stem}: {curve.last:.3f}, {curve.seconds[-1]:.1f} s", file=sys.stderr, flush=True)
        return curve

    def train(self, way: str, layout: str, rate: str, bandwidth: float) -> Curve:
        """Train, whatever an earlier run has left."""
        flags = self.ways[way]
        stages = ("--pipeline-model-parallel-layout", layout) if PIPELINE[0] in flags else ()
        updates = self.samples // batch(flags)
        return run_ranks(train, RANKS, self._argv(updates, rate, *flags, *stages), bandwidth)[-1]

    def at_all_rates(self, layout: str, bandwidth: float) -> dict[str, dict[str, Curve]]:
        """Train every way at each of ``RATES``."""
        return {way: {rate: self.learn(way, layout, rate, bandwidth) for rate in RATES} for way in self.ways}

    def cut(self, bandwidth: float) -> tuple[Profile, str]:
        """Return the profile, and the layout of the best stages for links of ``bandwidth``."""
        profile = self._profile()
        return profile, layout_of(partition(profile, [Level(RANKS, bandwidth)], straight=True), profile)

    def _profile(self) -> Profile:
        """Measure every layer on one rank, or read the measurements of an earlier run."""
        prepare(None, self.folder / "text")
        file = self.folder / "profile.json"
        if not file.exists():
            flags = ("--global-batch-size", str(MICROBATCH), "--profile-pipeline", str(file))
            run_ranks(train, 1, self._argv(8, RATES[0], *flags), math.inf)
        return read(file)

    def _argv(self, updates: int, rate: str, *flags: str) -> list[str]:
        text = ("--data-path", f"{self.folder}/text", "--train-iters", str(updates), "--lr", rate)
        return cpu.with_cpu_flags([*model(HIDDEN, TOKENS), *text, *flags])


def batch(flags: Sequence[str]) -> int:
    """Return the samples of an update."""
    return int(flags[flags.index("--global-batch-size") + 1])


def rates(tuned: dict[str, dict[str, float]]) -> str:
    """Return the table of last losses, the best of each row in bold."""
    rows: list[Row] = [(way, batch(WAYS[way]), *cells(losses)) for way, losses in tuned.items()]
    return table(("way", "samples an update", *RATES), rows)


def section(bandwidth: float, profile: Profile, curves: dict[str, Curve], samples: int, loss: float) -> str:
    """Return the section of a link: the partitioner's answer for it, and the measurements."""
    best = partition(profile, [Level(RANKS, bandwidth)])
    weights = sum(layer.parameter_bytes for layer in profile.layers)
    answer = "data parallelism" if len(best.stages) == 1 else f"the stages `{layout_of(best, profile)}`"
    about = (
        f"An all-reduce of all gradients takes {1e3 * ring_share(RANKS) * weights / bandwidth:.3g} ms of a "
        f"link, the message of a microbatch {1e3 * message_bytes(profile) / bandwidth:.3g} ms. "
        f"`mpp partition --workers {RANKS} --bandwidth {bandwidth:g}` chooses {answer}: "
        f"{1e3 * best.bottleneck_seconds:.1f} ms between microbatches, where data parallelism has "
        f"{1e3 * best.data_parallel_seconds:.1f} ms."
    )
    reached = {way: curve.seconds_to(loss) or math.nan for way, curve in curves.items()}
    goal = min(seconds for way, seconds in reached.items() if way.startswith(DATA_PARALLEL))
    rows = [
        (
            way,
            batch(WAYS[way]),
            f"{1e3 * curve.seconds[-1] / samples:.1f}",
            f"{curve.last:.3f}",
            f"{reached[way]:.1f}",
            f"{goal / reached[way]:.2f}",
        )
        for way, curve in curves.items()
    ]
    head = (
        *("way", "samples an update", "ms a sample", "last loss"),
        *(f"seconds to {loss:.3f}", "speedup over the faster data parallelism"),
    )
    return f"## {megabytes(bandwidth)}\n\n{about}\n\n{table(head, rows)}"


def megabytes(bandwidth: float) -> str:
    """Return the title of a link."""
    return f"{bandwidth / 1e6:,g} MB/s"


def message_bytes(profile: Profile) -> float:
    """Return the bytes that a microbatch sends over a cut between layers, in each direction."""
    return profile.layers[1].activation_bytes


def draw(links: dict[float, dict[str, Curve]], path: Path) -> None:
    """Draw loss against samples, and against seconds on each link."""
    picture = figure.new_figure(11, 7)
    against_samples, *panels = picture.subplots(math.ceil((1 + len(links)) / 2), 2, sharey=True).flat
    for way, curve in next(iter(links.values())).items():
        counts = [batch(WAYS[way]) * (update + 1) for update in range(len(curve.losses))]
        against_samples.plot(counts, curve.smooth, style(way), label=way)
    against_samples.set(title="any link", xlabel="samples", ylabel="training loss")
    against_samples.legend(frameon=False)
    for (bandwidth, curves), axes in zip(links.items(), panels, strict=False):
        for way, curve in curves.items():
            axes.plot(curve.seconds, curve.smooth, style(way))
        axes.set(title=megabytes(bandwidth), xlabel="seconds", ylabel="training loss")
    for axes in panels[len(links) :]:
        axes.remove()
    for axes in picture.axes:
        axes.spines[["top", "right"]].set_visible(False)
    picture.tight_layout()
    figure.save(picture, path)


def style(way: str) -> str:
    """Return a solid line without a flush, a dashed one with it."""
    return "-" if way.startswith("pipedream") else "--"


def measure(bench: Bench, bandwidths: Sequence[float], picture: Path) -> list[str]:
    """Tune, train on all links, draw, and return the page's text."""
    profile, layout = bench.cut(bandwidths[-1])
    curves = bench.at_all_rates(layout, bandwidths[0])
    tuned = {way: {rate: curve.last for rate, curve in of.items()} for way, of in curves.items()}
    links = {
        bandwidth: {way: bench.learn(way, layout, best(losses), bandwidth) for way, losses in tuned.items()}
        for bandwidth in bandwidths
    }
    draw(links, picture)
    loss = max(curve.last for curve in links[bandwidths[0]].values())
    weights = sum(layer.parameter_bytes for layer in profile.layers)
    about = (
        f"A GPT of {LAYERS} layers (hidden size {HIDDEN}) learns from {bench.samples:,} samples of {TOKENS} "
        f"bytes of text on {RANKS} ranks, {MICROBATCH} a microbatch, with Adam at a constant rate. Its "
        f"gradients are {weights / 1e6:.1f} MB, {weights / message_bytes(profile):.0f} times the message of "
        f"a microbatch at a cut. One rank computes forward and backward of a microbatch in "
        f"{1e3 * profile.seconds:.0f} ms. The stages of pipelines are `{layout}` on all links. Data "
        "parallelism reduces its gradients in buckets while it computes. A last loss is the mean over the "
        f"last {100 * LAST:.0f}% of the samples, and losses on the way are means of as many. Seconds are "
        "those to the last loss of the way that learns most slowly."
    )
    return [
        about,
        f"## The same learning rates for all, on {megabytes(bandwidths[0])}\n\n{rates(tuned)}",
        *(section(bandwidth, profile, curves, bench.samples, loss) for bandwidth, curves in links.items()),
        f"See {picture.name}.",
    ]


def main(
    out: Out = RESULTS / "slow_links.md",
    samples: Annotated[int, typer.Option(help="Samples that each run learns from.")] = 800,
    bandwidths: Annotated[str, typer.Option(help="Bytes a second, the fastest link first.")] = BANDWIDTHS,
    keep: Keep = None,
) -> None:
    """Train every way on every link and write the page and the picture."""
    picture = picture_of(out, "slow_links")
    with kept_in(keep) as folder:
        bench = Bench(folder, samples)
        about, *sections = measure(bench, [float(bandwidth) for bandwidth in bandwidths.split(",")], picture)
    publish(out, "Time to a loss on slow links", about, *sections)


if __name__ == "__main__":
    typer.run(main)
