"""Train a small GPT on real text, on CPUs, under stock 1F1B and under V-Half, and compare.

    python scripts/demo.py [--text FOLDER_OR_FILE] [--out FOLDER] [--iterations N]

Four pipeline ranks train from one starting checkpoint through Megatron's own training loop, once as
stock Megatron does it and once with --pipeline-schedule v-half.  At the end it prints both runs' losses side
by side, how long their last steps took and what activations they kept, and draws a picture of both steps.

Ranks that share cores wait for them, so the wall clock says little about a schedule.  Both steps are
therefore replayed with the processor time of each action, as if every rank had a core.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
import time
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
from megatron_pp_ext.schedule.formats import trace_file
from megatron_pp_ext.schedule.recorded import SECONDS, RecordedStep, on_own_cores
from megatron_pp_ext.schedule.simulate import Timeline
from megatron_pp_ext.text_data import VOCAB_SIZE, TextDataError, prepare
from megatron_pp_ext.view import picture

RANKS, MICROBATCHES, MICROBATCH_SIZE = 4, 8, 2
MODEL = (
    f"--pipeline-model-parallel-size {RANKS} --num-layers 8 --hidden-size 256 --num-attention-heads 4 "
    f"--seq-length 128 --max-position-embeddings 128 --micro-batch-size {MICROBATCH_SIZE} "
    f"--global-batch-size {MICROBATCHES * MICROBATCH_SIZE} --attention-dropout 0 --hidden-dropout 0 "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 1.0 --log-interval 1 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --eval-iters 2 "
    "--eval-interval 1000 --ckpt-format torch_dist --distributed-timeout-minutes 5"
).split()
ITERATION = re.compile(r"iteration\s+(\d+)/.*?lm loss: ([0-9.E+-]+)")
VALIDATION = re.compile(r"validation loss at iteration.*?lm loss value: ([0-9.E+-]+)")

SHOWN_LOSSES = 4

console = Console(highlight=False)


class Losses(dict[int, float]):
    """Training losses by iteration, as printed, and the last validation loss."""

    validation: float | None = None


def main(
    text: Annotated[Path | None, typer.Option(help="Any folder of text or a .txt file.")] = None,
    out: Annotated[Path, typer.Option(help="Where data, checkpoints, traces and logs go.")] = Path(
        "runs/demo"
    ),
    iterations: Annotated[int, typer.Option(min=3, help="Training steps, the start included.")] = 10,
) -> None:
    """Run the demo."""
    out = out.resolve()
    empty_folder(out, text)
    show_expectation(iterations - 1)
    # Only the run itself needs to know that there is no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    console.print(f"[bold]Text[/bold] {text or 'the sources of the Python standard library'}")
    try:
        data = prepare(text, out / "data" / "text")
    except TextDataError as error:
        raise SystemExit(f"demo: {error}") from error
    console.print(f"  {data.documents} documents, {data.tokens:,} tokens of one byte each\n")

    common = [
        *MODEL, "--data-path", str(out / "data" / "text"), "--split", data.split,
        "--train-iters", str(iterations),
    ]  # fmt: skip
    start = ["--save", str(out / "start"), "--save-interval", "1000", "--exit-interval", "1"]
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
        disable=not console.is_terminal,
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
    replayed = {name: on_own_cores(step).timeline() for name, step in steps.items()}
    ran = {name: step.timeline() for name, step in steps.items()}
    show_steps(steps, {"replay, a core per rank": replayed, f"here, {machine()}": ran})
    picture.draw_groups(
        [
            {
                f"{name}, replayed with each action's processor time, as with a core for every rank": line
                for name, line in replayed.items()
            },
            {f"{name}, as it ran with {machine()}": line for name, line in ran.items()},
        ],
        out / "schedules.png",
        SECONDS.time,
    )
    show_next(out)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """Describe what the ranks share."""
    return f"{RANKS} ranks on {cores()} core{'s' * (cores() != 1)}"


def show_expectation(steps: int) -> None:
    """Print what is about to happen, and what it can show."""
    console.print(
        f"{RANKS} processes train a small GPT: one step for a starting checkpoint, then {steps} steps under "
        f"stock 1F1B and {steps} under V-Half. On two idle cores this takes 2 to 3 minutes, half of it for "
        "imports.\n"
        "Expect equal losses, less activation memory on the rank that keeps most, and a smaller bubble where "
        "every rank has a core."
    )
    if cores() < RANKS:
        console.print(f"Here they are {machine()}, so the wall clock shows mostly waits for a core.")
    console.print()


def empty_folder(out: Path, text: Path | None) -> None:
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
    began = time.monotonic()
    say_in_a_pipe(f"{title}: importing Megatron")
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
                say_in_a_pipe(f"  step {len(losses)} of {steps}, {time.monotonic() - began:.0f} s")
        status = job.wait()
    if status or len(losses) != steps:
        progress.stop()
        raise SystemExit(f"demo: {title} failed with exit code {status}: {reason(log.read_text())} ({log})")
    return losses


def say_in_a_pipe(text: str) -> None:
    """Print ``text`` where no progress bar is seen."""
    if not console.is_terminal:
        console.print(text)


def show_losses(losses: dict[str, Losses]) -> None:
    """Print some losses of both runs side by side, and the largest difference of all."""
    stock, run = losses.values()
    table = Table("iteration", *losses, "difference", title="Training loss", title_justify="left")
    rows = {str(iteration): (stock[iteration], run[iteration]) for iteration in stock}
    names = list(rows)
    last = len(names) - 1
    for place in sorted({last * part // (SHOWN_LOSSES - 1) for part in range(SHOWN_LOSSES)}):
        table.add_row(names[place], *loss_cells(*rows[names[place]]))
    if stock.validation is not None and run.validation is not None:
        table.add_row("validation", *loss_cells(stock.validation, run.validation))
    console.print(table)
    largest = max(abs(first - second) for first, second in rows.values())
    console.print(
        f"Largest difference in {len(rows)} steps: {shown_difference(largest)}; losses have 7 digits.\n"
    )


def loss_cells(stock: float, run: float) -> tuple[str, str, str]:
    """Return both losses and their difference as text."""
    return f"{stock:.6f}", f"{run:.6f}", shown_difference(run - stock)


def shown_difference(difference: float) -> str:
    """Return ``difference`` as text, 0 without an exponent."""
    return f"{difference:.0e}" if difference else "0"


def show_steps(steps: dict[str, RecordedStep], timelines: dict[str, dict[str, Timeline]]) -> None:
    """Print how long both steps are by each of ``timelines``, and every rank's peak of activation bytes."""
    table = Table("", *steps, "ratio", title="The last step", title_justify="left")
    for title, pair_of_timelines in timelines.items():
        stock, run = pair_of_timelines.values()
        cells = (f"{line.makespan:.2f} s, bubble {line.bubble:.0%}" for line in (stock, run))
        table.add_row(title, *cells, f"{run.makespan / stock.makespan:.2f}")
    table.add_section()
    peaks = [[record.peak_bytes for record in step.records] for step in steps.values()]
    rows = {f"peak activations, rank {rank}": pair for rank, pair in enumerate(zip(*peaks, strict=True))}
    rows["peak activations, highest"] = (max(peaks[0]), max(peaks[1]))
    for title, pair in rows.items():
        cells = (f"{peak / 2**20:.1f} MiB" for peak in pair)
        table.add_row(title, *cells, f"{pair[1] / pair[0]:.2f}")
    console.print(table)
    console.print(
        "The replay gives each action the processor time that it took here, and messages no time: it is the "
        "step of a machine with a core for every rank. A CPU shows equality and memory; its wall clock says "
        "nothing about the speed of a schedule on GPUs.\n"
    )


def show_next(out: Path) -> None:
    """Print where the results are, and what to try next."""
    folder = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    mpp = Path(sys.executable).with_name("mpp")
    mpp = mpp.relative_to(Path.cwd()) if mpp.is_relative_to(Path.cwd()) else mpp
    lines = {
        "picture of both steps": f"{folder}/schedules.png",
        "to zoom into at ui.perfetto.dev": f"{folder}/v-half.trace.json",
        "what the ranks waited for": f"{mpp} trace {folder}/v-half.trace.json --processor-time",
        "all schedules for 8 ranks": f"{mpp} compare -p 8 -m 16",
    }
    for title, words in lines.items():
        console.print(f"{title:<33}[bold]{words}[/bold]", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
