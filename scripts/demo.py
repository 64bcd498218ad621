"""Train a small GPT on real text, on CPUs, under stock 1F1B and under V-Half, and compare.

    python scripts/demo.py [--text FOLDER_OR_FILE] [--out FOLDER] [--iterations N]

Four pipeline ranks train from one starting checkpoint through Megatron's own training loop, once as
stock Megatron does it and once with --pipeline-schedule v-half.  At the end it prints both runs' losses
side by side and every rank's measured peak of live activation bytes, and draws a picture of what ran.
"""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from megatron_pp_ext.jobs import command, process
from megatron_pp_ext.jobs.failure import reason
from megatron_pp_ext.schedule.recorded import RecordedStep
from megatron_pp_ext.text_data import VOCAB_SIZE, TextDataError, prepare
from megatron_pp_ext.view import picture, trace_file

RANKS, MICROBATCHES, MICROBATCH_SIZE = 4, 8, 2
MODEL = (
    f"--pipeline-model-parallel-size {RANKS} --num-layers 8 --hidden-size 128 --num-attention-heads 4 "
    f"--seq-length 128 --max-position-embeddings 128 --micro-batch-size {MICROBATCH_SIZE} "
    f"--global-batch-size {MICROBATCHES * MICROBATCH_SIZE} --attention-dropout 0 --hidden-dropout 0 "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 1.0 --log-interval 1 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --split 95,5,0 --eval-iters 2 "
    "--eval-interval 1000 --ckpt-format torch_dist --distributed-timeout-minutes 5"
).split()
ITERATION = re.compile(r"iteration\s+(\d+)/.*?lm loss: ([0-9.E+-]+)")
VALIDATION = re.compile(r"validation loss at iteration.*?lm loss value: ([0-9.E+-]+)")

console = Console(highlight=False)


class Losses(dict[int, float]):
    """Training losses by iteration, as printed, and the last validation loss."""

    validation: float | None = None


def main(
    text: Annotated[Path | None, typer.Option(help="Any folder of text or a .txt file.")] = None,
    out: Annotated[Path, typer.Option(help="Where data, checkpoints, traces and logs go.")] = Path(
        "runs/demo"
    ),
    iterations: Annotated[int, typer.Option(min=3, help="Training steps, the start included.")] = 16,
) -> None:
    """Run the demo."""
    out = out.resolve()
    make_room(out, text)
    console.print(f"[bold]Text[/bold] {text or 'the sources of the Python standard library'}")
    try:
        data = prepare(text, out / "data" / "text")
    except TextDataError as error:
        raise SystemExit(f"demo: {error}") from error
    console.print(f"  {data.documents} documents, {data.tokens:,} tokens of one byte each\n")

    common = [*MODEL, "--data-path", str(out / "data" / "text"), "--train-iters", str(iterations)]
    start = ["--save", str(out / "start"), "--save-interval", "1000", "--exit-interval", "1"]
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
    ) as progress:
        train(progress, "starting checkpoint (one step)", out / "start.log", [*common, *start], 1)
        resume = [*common, "--load", str(out / "start")]
        losses, steps = {}, {}
        for name, flags in {"stock 1F1B": [], "V-Half": ["--pipeline-schedule", "v-half"]}.items():
            trace = out / f"{name.replace(' ', '-').lower()}.trace.json"
            losses[name] = train(
                progress,
                f"{name}, {iterations - 1} steps",
                trace.with_suffix("").with_suffix(".log"),
                [*resume, *flags, "--pipeline-trace", str(trace)],
                iterations - 1,
            )
            steps[name] = trace_file.read(trace)

    show_losses(losses)
    show_peaks(steps)
    drawing = out / "schedules.png"
    picture.draw({f"{name}, measured (seconds)": step.timeline() for name, step in steps.items()}, drawing)
    console.print(f"\nThe last step of both, as it really ran: [bold]{drawing}[/bold]")
    console.print(f"The same to zoom into at ui.perfetto.dev: {out}/*.trace.json")


def make_room(out: Path, text: Path | None) -> None:
    """Make ``out`` an empty folder; only what an earlier demo left there is deleted."""
    mark = out / ".demo"
    if out.exists() and not mark.is_file() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(
            f"demo: {out} has files that no demo wrote; give another folder, or empty it yourself"
        )
    if text is not None and out in text.resolve().parents:
        raise SystemExit(f"demo: {text} is in {out}, which the demo empties; give another folder")
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    mark.touch()


def train(progress: Progress, title: str, log: Path, flags: Sequence[str], steps: int) -> Losses:
    """Run one training job with a progress bar, and return its losses."""
    task = progress.add_task(title, total=steps, loss="importing Megatron")
    losses = Losses()
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    words = command.training(flags, RANKS, cpu=True)
    with log.open("w") as file, process.started(words, subprocess.PIPE, environment) as job:
        assert job.stdout is not None
        for line in map(bytes.decode, job.stdout):
            file.write(line)
            if match := VALIDATION.search(line):
                losses.validation = float(match[1])
            elif match := ITERATION.search(line):
                losses[int(match[1])] = float(match[2])
                progress.update(task, advance=1, loss=f"loss {float(match[2]):.4f}")
        status = job.wait()
    if status or len(losses) != steps:
        progress.stop()
        raise SystemExit(f"demo: {title} failed with exit code {status}: {reason(log.read_text())} ({log})")
    return losses


def show_losses(losses: dict[str, Losses]) -> None:
    """Print the losses of both runs side by side."""
    stock, ours = losses.values()
    table = Table("iteration", *losses, "difference", title="Training loss", title_justify="left")
    for iteration in stock:
        row = stock[iteration], ours[iteration]
        table.add_row(str(iteration), *(f"{loss:.6f}" for loss in row), f"{row[1] - row[0]:.1e}")
    if stock.validation is not None and ours.validation is not None:
        row = stock.validation, ours.validation
        table.add_section()
        table.add_row("validation", *(f"{loss:.6f}" for loss in row), f"{row[1] - row[0]:.1e}")
    console.print(table)


def show_peaks(steps: dict[str, RecordedStep]) -> None:
    """Print the peak of activation bytes that each rank kept alive at one time."""
    stock, ours = steps.values()
    table = Table("rank", *steps, "ratio", title="Measured peak of live activations", title_justify="left")
    for rank, pair in enumerate(zip(stock.records, ours.records, strict=True)):
        cells = (f"{record.peak_bytes / 2**20:.2f} MiB ({record.peak_microbatches} live)" for record in pair)
        table.add_row(str(rank), *cells, f"{pair[1].peak_bytes / pair[0].peak_bytes:.2f}")
    table.add_section()
    highest = [max(record.peak_bytes for record in step.records) for step in (stock, ours)]
    cells = (f"{peak / 2**20:.2f} MiB" for peak in highest)
    table.add_row("highest", *cells, f"{highest[1] / highest[0]:.2f}")
    console.print(table)
    console.print("Live: whole stages under 1F1B, half stages (chunks) under V-Half.", style="dim")


if __name__ == "__main__":
    typer.run(main)
