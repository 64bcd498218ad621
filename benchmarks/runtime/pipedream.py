"""Does a pipeline that never flushes have no bubble, and what does it learn?  (two CPU cores, gloo)

    python -m benchmarks.runtime.pipedream [--samples N]

First, four ranks run stages that sleep, so that they do not compete for cores: 1F1B with a flush at every
update beside pipedream without one, over ten updates.  Then a small GPT learns the sources of Python's
standard library on two ranks: loss against samples and against time under stock's 1F1B, pipedream-2bw and
pipedream.  Writes results/pipedream.md and .png.
"""

import re
import tempfile
from functools import partial, update_wrapper
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.progress import track

from benchmarks.measuring import pretrain
from benchmarks.report import RESULTS, Out, Row, publish, sections, table
from benchmarks.runtime.stages import SleepingLayer, Times, loss_of
from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.groups import direction_groups
from megatron_pp_ext.runtime.plan import plan_orders
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.schedule.families import one_f_one_b, pipedream
from megatron_pp_ext.schedule.families.round_robin import Replicas
from megatron_pp_ext.text_data import VOCAB_SIZE, prepare
from megatron_pp_ext.view import figure
from tests.support.module_stage import ModuleStage
from tests.support.ranks import run_ranks

RANKS, UPDATES = 4, 10
STAGES = Replicas.straight(RANKS)
TIMES = Times(forward=0.010, input_gradient=0.010, weight_gradient=0.010, message_bytes=8 << 10)
BACKWARD = TIMES.input_gradient + TIMES.weight_gradient
MODEL = (
    "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --num-layers 4 --hidden-size 128 "
    "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 "
    "--attention-dropout 0 --hidden-dropout 0 --lr 5e-4 --lr-decay-style constant --clip-grad 0 "
    f"--eval-iters 0 --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --split 100,0,0 "
    "--eval-interval 100000 --distributed-timeout-minutes 5"
).split()
TWO_VERSIONS = ("--pipeline-schedule", "pipedream-2bw")
LOW = ("--lr", "1e-4")
RUNS = {
    "1f1b (stock), 8 microbatches an update": (32, ()),
    "pipedream-2bw, 8 microbatches an update": (32, TWO_VERSIONS),
    "1f1b (stock), 8, a fifth of the learning rate": (32, LOW),
    "pipedream-2bw, 8, a fifth of the learning rate": (32, (*TWO_VERSIONS, *LOW)),
    "1f1b (stock), 1 microbatch an update": (4, ()),
    "pipedream, 1 microbatch an update": (4, ("--pipeline-schedule", "pipedream")),
}
LINE = re.compile(
    r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([0-9.]+).*?lm loss: ([0-9.E+-]+)"
)
BETWEEN = 320
"""Samples between two points of a curve; not fewer, since all ranks wait for each other to log one."""


class Curve(NamedTuple):
    """Samples and seconds from the start, and the mean loss since the previous point."""

    samples: list[int]
    seconds: list[float]
    losses: list[float]


def sleep_through(rank: int, flushes: bool, interval: int) -> float:
    """Run all updates on one rank, and return its milliseconds a microbatch after the first update."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    everyone = list(range(RANKS))
    channels = Channels(everyone, *direction_groups(everyone), TIMES.shape, torch.float, torch.device("cpu"))
    stage = ModuleStage(
        rank,
        SleepingLayer(TIMES, chunks=1),
        first_inputs=(lambda _: torch.empty(TIMES.shape)) if rank == 0 else None,
        loss=loss_of if rank == RANKS - 1 else None,
    )
    # The first backward of a process imports for a second.
    torch.autograd.backward(stage.module(torch.empty(TIMES.shape)), grad_tensors=torch.empty(TIMES.shape))
    recorder = StepRecorder()
    dist.barrier()
    with recorder.step():
        for update in range(UPDATES + 1):
            if flushes:
                orders = one_f_one_b.build(RANKS, interval).orders
            else:
                orders = pipedream.step(STAGES, interval, update, UPDATES + 2 + RANKS)
            plan = plan_orders(orders, RANKS, STAGES.rank_of, rank, flushes=flushes)
            execute(plan, Rank({rank: stage}, channels, recorder))
    dist.barrier()  # without a flush messages may be in flight, and go with the channels
    # The first update fills the pipeline; the others are its steady state.
    events = recorder.record.events[-UPDATES * len(plan.actions) :]
    return 1e3 * (events[-1].end - events[0].start) / (UPDATES * interval)


def bubble() -> str:
    """Milliseconds a microbatch on each rank, without the first update, which fills the pipeline."""
    rows: list[Row] = []
    for name, flushes in (("1f1b", True), ("pipedream", False)):
        for interval in (1, 8):
            taken = run_ranks(sleep_through, RANKS, flushes, interval)
            rows.append((name, interval, *(f"{ms:.1f}" for ms in taken)))
    return table(("schedule", "microbatches an update", "rank 0", "1", "2", "3"), rows)


def learn(data: str, batch: int, flags: tuple[str, ...], samples: int) -> Curve:
    """Train on ``samples`` samples and read the log."""
    length = ["--train-iters", str(samples // batch), "--log-interval", str(max(1, BETWEEN // batch))]
    log = pretrain([*MODEL, "--data-path", data, *flags, "--global-batch-size", str(batch), *length])
    points = [(int(i), float(ms), float(loss)) for i, ms, loss in LINE.findall(log)]
    steps = [0, *(iteration for iteration, _, _ in points)]
    seconds = accumulate(
        (after - before) * ms / 1e3
        for before, after, (_, ms, _) in zip(steps, steps[1:], points, strict=False)
    )
    return Curve([i * batch for i, _, _ in points], list(seconds), [loss for _, _, loss in points])


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Draw loss against samples and against seconds."""
    picture = figure.new_figure(11, 4.2)
    axes = picture.subplots(1, 2, sharey=True)
    for name, curve in curves.items():
        style = "-" if "pipedream" in name else "--"
        axes[0].plot(curve.samples, curve.losses, style, label=name)
        axes[1].plot(curve.seconds, curve.losses, style, label=name)
    axes[0].set(xlabel="samples", ylabel="training loss")
    axes[1].set(xlabel="seconds of training")
    axes[1].legend(frameon=False)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    picture.tight_layout()
    figure.save(picture, path)


def convergence(samples: int, picture: Path) -> str:
    """Stages and gloo share two cores here, so seconds say little about a cluster."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(None, Path(folder) / "text")
        curves = {
            name: learn(f"{folder}/text", batch, flags, samples)
            for name, (batch, flags) in track(RUNS.items(), "training")
        }
    draw(curves, picture)
    rows = [
        (name, f"{mean(curve.losses[-3:]):.3f}", f"{curve.seconds[-1]:.1f}") for name, curve in curves.items()
    ]
    return f"{table(('run', 'loss over the last points', 'seconds'), rows)}\n\nSee {picture.name}."


def main(
    out: Out = RESULTS / "pipedream.md",
    samples: Annotated[
        int, typer.Option(help="Samples that each run learns from; 0 leaves the runs out.")
    ] = 9600,
) -> None:
    """Measure both and write the page and the picture."""
    picture = RESULTS / "pipedream.png" if str(out) == "-" else out.with_suffix(".png")
    parts = {"Bubble": bubble}
    if samples:
        parts["Convergence"] = update_wrapper(partial(convergence, samples, picture), convergence)
    about = (
        f"Bubble: {RANKS} ranks that sleep, F {1e3 * TIMES.forward:g} ms, B {1e3 * BACKWARD:g} ms, {UPDATES} "
        f"updates; the work alone takes {1e3 * (TIMES.forward + BACKWARD):g} ms. Convergence: a GPT of 4 "
        f"layers on two ranks, {samples:,} samples of 64 bytes of text."
    )
    publish(out, "Pipelines that never flush", about, *sections(parts))


if __name__ == "__main__":
    typer.run(main)
