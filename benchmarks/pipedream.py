"""Does a pipeline that never flushes have no bubble, and what does it learn?  (two CPU cores, gloo)

    python benchmarks/pipedream.py [--samples N]

First four ranks with stages that sleep, so that they do not compete for cores: 1F1B with a flush at
every update beside pipedream without one, over ten updates.  Then a small GPT on the sources of
Python's standard library, on two ranks: loss against samples and against time under stock's 1F1B,
pipedream-2bw and pipedream, in results/pipedream.md and .png.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
import typer
from rich.progress import track
from sleeping import SleepingLayer, Times, loss_of

from megatron_pp_ext.runtime.channels import Channels, direction_groups
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.module_stage import ModuleStage
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.recorder import StepRecorder, gather
from megatron_pp_ext.schedule.families import one_f_one_b, pipedream
from megatron_pp_ext.text_data import VOCAB_SIZE, prepare
from megatron_pp_ext.view import figure

RESULTS = Path(__file__).parent / "results"
RANKS, UPDATES = 4, 10
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
"""Samples between two points of a curve: Megatron's log makes all ranks wait for each other."""


class Curve(NamedTuple):
    """Samples and seconds from the start, and the mean loss since the point before."""

    samples: list[int]
    seconds: list[float]
    losses: list[float]


def sleep_through(rank: int, port: int, flushes: bool, interval: int, told: str) -> None:
    """Run all updates on one rank; rank 0 writes each rank's milliseconds a microbatch after the fill."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    everyone = list(range(RANKS))
    groups = direction_groups(everyone)
    channels = Channels(everyone, *groups, TIMES.shape, torch.float, torch.device("cpu"))
    stage = ModuleStage(
        rank,
        SleepingLayer(TIMES, chunks=1),
        first_inputs=(lambda _: torch.empty(TIMES.shape)) if rank == 0 else None,
        loss=loss_of if rank == RANKS - 1 else None,
    )
    # A process's first backward takes a second of imports.
    torch.autograd.backward(stage.module(torch.empty(TIMES.shape)), grad_tensors=torch.empty(TIMES.shape))
    recorder = StepRecorder()
    dist.barrier()
    with recorder.step():
        for update in range(UPDATES + 1):
            if flushes:
                schedule = one_f_one_b.build(RANKS, interval)
            else:
                schedule = pipedream.step(RANKS, interval, update, UPDATES + 2 + RANKS)
            execute(plan_rank(schedule, rank), {rank: stage}, channels, recorder, flush=flushes)
    # The first update fills the pipeline; the others are what goes on for ever.
    per_update = len(plan_rank(schedule, rank).steps)
    records = gather(
        recorder.record._replace(events=recorder.record.events[-UPDATES * per_update :]), dist.group.WORLD
    )
    if records is not None:
        spans = [record.events[-1].end - record.events[0].start for record in records]
        Path(told).write_text(" ".join(f"{1e3 * span / (UPDATES * interval):.2f}" for span in spans))


def bubble(flushes: bool, interval: int) -> list[float]:
    """Milliseconds that each rank takes for a microbatch."""
    with tempfile.TemporaryDirectory() as folder:
        told = f"{folder}/told"
        port = 20000 + os.getpid() % 10000
        torch.multiprocessing.spawn(sleep_through, (port, flushes, interval, told), nprocs=RANKS)
        return [float(word) for word in Path(told).read_text().split()]


def learn(data: str, batch: int, flags: tuple[str, ...], samples: int) -> Curve:
    """Train on ``samples`` samples and read the log."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "megatron_pp_ext.pretrain_gpt", "--cpu", *MODEL, "--data-path", data, *flags]
    command += ["--global-batch-size", str(batch), "--train-iters", str(samples // batch)]
    command += ["--log-interval", str(max(1, BETWEEN // batch))]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{run.stdout[-3000:]}{run.stderr[-3000:]}")
    points = [(int(i), float(ms), float(loss)) for i, ms, loss in LINE.findall(run.stdout)]
    steps = [0, *(iteration for iteration, _, _ in points)]
    seconds = accumulate(
        (after - before) * ms / 1e3
        for before, after, (_, ms, _) in zip(steps, steps[1:], points, strict=False)
    )
    return Curve([i * batch for i, _, _ in points], list(seconds), [loss for _, _, loss in points])


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Loss against samples and against seconds."""
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


def convergence(samples: int) -> list[str]:
    """Train, draw the curves, and tell where they end."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(None, Path(folder) / "text")
        curves = {
            name: learn(f"{folder}/text", batch, flags, samples)
            for name, (batch, flags) in track(RUNS.items(), "training")
        }
    draw(curves, RESULTS / "pipedream.png")
    lines = [
        "",
        f"## Convergence: a GPT of 4 layers on two ranks, {samples:,} samples of 64 bytes of text",
        "",
        "Stages and gloo share two cores here, so seconds say little about a cluster.  See pipedream.png.",
        "",
        "| run | loss over the last points | seconds |",
        "| --- | --- | --- |",
    ]
    for name, curve in curves.items():
        tail = curve.losses[-3:]
        lines.append(f"| {name} | {sum(tail) / len(tail):.3f} | {curve.seconds[-1]:.1f} |")
    return lines


def main(
    samples: Annotated[
        int, typer.Option(help="Samples that each run learns from; 0 leaves the runs out.")
    ] = 9600,
) -> None:
    """Measure both and write the results."""
    lines = [
        "# Pipelines that never flush",
        "",
        f"`python benchmarks/pipedream.py --samples {samples}` on {platform.machine()}, "
        f"{os.cpu_count()} cores, {date.today()}.",
        "",
        f"## Bubble: {RANKS} ranks that sleep, F {1e3 * TIMES.forward:g} ms, B {1e3 * BACKWARD:g} ms, "
        f"{UPDATES} updates",
        "",
        "Milliseconds a microbatch on each rank, the fill excluded; the work alone takes "
        f"{1e3 * (TIMES.forward + BACKWARD):g}.",
        "",
        "| schedule | microbatches an update | rank 0 | 1 | 2 | 3 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, flushes, interval in (
        ("1f1b", True, 1),
        ("1f1b", True, 8),
        ("pipedream", False, 1),
        ("pipedream", False, 8),
    ):
        lines.append(
            f"| {name} | {interval} | {' | '.join(f'{ms:.1f}' for ms in bubble(flushes, interval))} |"
        )

    if samples:
        lines += convergence(samples)
    (RESULTS / "pipedream.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
