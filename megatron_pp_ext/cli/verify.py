"""``mpp verify``: whether a schedule trains as stock's 1F1B does, with your flags on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.report import console, folding
from megatron_pp_ext.job import flag_table
from megatron_pp_ext.job.sizes import smallest_world
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.jobs.command import words_of
from megatron_pp_ext.planner.search.launch_lines import environment

if TYPE_CHECKING:
    from megatron_pp_ext.verification.verdict import EqualityVerdict, Row

_OUR_SCRIPT = "megatron_pp_ext.pretrain_gpt"
_GRADIENTS_SHOWN = 5


@app.command()
def verify(
    script: Annotated[
        str, typer.Argument(help=f"Your training script, or {_OUR_SCRIPT}, which is the default.")
    ] = _OUR_SCRIPT,
    flags: Annotated[
        list[str] | None, typer.Argument(help="After --, the flags of your job with --pipeline-schedule.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps to compare.")] = 3,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks to start here.  [default: as few as the flags need]")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="The checkpoint to start from.  [default: that of --load, or one made by a step of stock]",
            metavar="DIR",
        ),
    ] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Compare every parameter's gradient of the first step too.")
    ] = False,
    keep_dropout: Annotated[
        bool, typer.Option("--keep-dropout", help="Leave dropout as the flags have it.  [default: off]")
    ] = False,
    repeat: Annotated[
        bool | None,
        typer.Option(
            help="Run stock twice, and allow for its distance from itself.  [default: on GPUs only]"
        ),
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Run on the CPU.  [default: only without a GPU]")
    ] = False,
    folder: Annotated[
        Path, typer.Option(help="Where logs, records and a made checkpoint go.", metavar="DIR")
    ] = Path("runs/verify"),
) -> None:
    """Train a few steps under stock's 1F1B and under a schedule, from one checkpoint, and compare.

    mpp verify pretrain_gpt.py -- FLAGS --pipeline-schedule v-half

    Exit status 0: equal; 1: they differ; 2: it could not be found out.
    """
    from megatron_pp_ext.verification import reference_runs
    from megatron_pp_ext.verification.verdict import Arithmetic, compare

    flags = flags or []
    if script.startswith("-"):  # without a script, the first flag stands in its place
        script, flags = _OUR_SCRIPT, [script, *flags]
    if steps < 1:
        raise ValueError(f"--steps wants 1 or more, got {steps}")
    words = words_of(flags)
    name = reference_runs.schedule_of(flags)
    path = _path(script)
    fewest = smallest_world(Job.of(flag_table.parse(flags, {})[0]))
    if ranks is not None and (ranks < 1 or ranks % fewest):
        raise ValueError(f"--ranks {ranks} is not a multiple of {fewest}, which one copy of the model needs")
    world = ranks or fewest
    on_cpu = cpu or not _has_gpus(world)
    arithmetic = Arithmetic.of_flags(words, world)
    runs = reference_runs.planned(
        flags,
        folder.absolute(),
        steps,
        checkpoint=checkpoint.absolute() if checkpoint else None,
        keep_dropout=keep_dropout,
        gradients=gradients,
        repeat=not on_cpu if repeat is None else repeat,
    )
    expected = reference_runs.differs_with_dropout(name) if keep_dropout else None
    if expected:
        console.print(f"A difference is expected: {expected}.", soft_wrap=True)

    def report(run: reference_runs.Run) -> None:
        at = f"run {runs.index(run) + 1} of {len(runs)}: {run.what}"
        folder_here = Path.cwd()
        log = run.log.relative_to(folder_here) if run.log.is_relative_to(folder_here) else run.log
        console.print(f"{at}\n    log: {log}", soft_wrap=True)

    reference_runs.start(runs, world, path, on_cpu, report, environment(flags))
    records = reference_runs.recorded(runs, steps)
    verdict = compare(
        records[reference_runs.STOCK],
        records[reference_runs.SCHEDULE],
        arithmetic,
        records.get(reference_runs.AGAIN),
        gradients,
    )
    _show(verdict, name)
    if expected and not verdict.is_equal:
        console.print("This was expected: without --keep-dropout the two can be compared.")
    raise typer.Exit(0 if verdict.is_equal else 1)


def _path(script: str) -> Path | None:
    path = Path(script)
    if script == _OUR_SCRIPT or (path.name == "pretrain_gpt.py" and path.parent.name == "megatron_pp_ext"):
        return None
    if not path.is_file():
        raise ValueError(f"{script} is no file: give your training script, or {_OUR_SCRIPT}")
    return path


def _has_gpus(ranks: int) -> bool:
    """Whether this machine has GPUs; ValueError if it has fewer than ``ranks``."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < ranks:
        raise ValueError(
            f"the flags need {ranks} ranks and this machine has {gpus} GPUs: give smaller parallel sizes, or "
            "--cpu"
        )
    return gpus > 0


def _show(verdict: "EqualityVerdict", name: str) -> None:
    from megatron_pp_ext.verification.verdict import GRADIENT, LOSS, NORM

    table = folding("step", "", "stock 1F1B", name, "difference", "allowed")
    for row in sorted([*verdict.of(LOSS), *verdict.of(NORM)], key=lambda row: row.step):
        style = "" if row.is_equal else "red"
        compared = (Text(text, style) for text in (f"{row.difference:.3g}", f"{row.tolerance}"))
        table.add_row(str(row.step), row.name, _number(row.stock), _number(row.ours), *compared)
    console.print(table)
    for kind in (LOSS, NORM, GRADIENT):
        if rows := verdict.of(kind):
            _report(kind, rows, verdict.largest(kind))
    if verdict.is_equal:
        console.print(f"equal: {name} trains as stock's 1F1B does", style="green")
    else:
        console.print(f"differs: {name} does not train as stock's 1F1B does", style="red")


def _report(kind: str, rows: "list[Row]", largest: "Row") -> None:
    """Print the largest difference of a kind, and which tolerances apply and why."""
    from megatron_pp_ext.verification.verdict import GRADIENT

    if kind == GRADIENT:
        place = (
            f"in {largest.name}" if largest.difference else f"in all {len(rows)} tensors of the first step"
        )
    else:
        place = f"in step {largest.step}" if largest.difference else f"in all {len(rows)} steps"
    console.print(f"largest difference of a {kind}: {largest.difference:.3g} {place}", soft_wrap=True)
    for tolerance in dict.fromkeys(row.tolerance for row in rows):
        console.print(f"    allowed {tolerance}: {tolerance.why}", soft_wrap=True, style="dim")
    wrong = sorted((row for row in rows if not row.is_equal), key=lambda row: -row.difference)
    if kind == GRADIENT and wrong:
        console.print(f"    {len(wrong)} of {len(rows)} differ, the most:", style="red")
        for row in wrong[:_GRADIENTS_SHOWN]:
            console.print(f"    {row.difference:.3g}  {row.name}", soft_wrap=True, style="red")


def _number(value: float | None) -> str:
    return "skipped" if value is None else f"{value:.9g}"
