"""The ``mpp`` command: look at schedules, and at what this machine has."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megatron_pp_ext.schedule import catalog, csv_file
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import Timeline, simulate

app = typer.Typer(
    help="Pipeline schedules for Megatron-LM.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
console = Console(highlight=False)
Picture = Annotated[Path | None, typer.Option(help="Draw it into FILE.png, .svg or .pdf.", metavar="FILE")]


@app.command("list")
def list_schedules() -> None:
    """The schedules that --pipeline-schedule accepts."""
    table = Table("schedule", "what it does", "placement", "chunks a rank", "source")
    for entry in catalog.ENTRIES.values():
        chunks = f"{entry.chunks} or more" if entry.any_chunks else str(entry.chunks)
        table.add_row(entry.name, entry.summary, entry.shape, chunks, entry.paper)
    console.print(table)


@app.command()
def schedule(
    name: Annotated[str, typer.Argument(help="A name from `mpp list`.")],
    ranks: Annotated[int, typer.Option("-p", "--ranks", help="Pipeline-parallel size.")] = 4,
    microbatches: Annotated[int, typer.Option("-m", "--microbatches", help="Microbatches a step.")] = 8,
    chunks: Annotated[
        int | None, typer.Option(help="Stages a rank, where the schedule leaves it open.")
    ] = None,
    f: Annotated[float, typer.Option("--f", help="Seconds of a chunk's forward.")] = 1.0,
    i: Annotated[float, typer.Option("--i", help="Seconds of a chunk's input gradient.")] = 1.0,
    w: Annotated[float, typer.Option("--w", help="Seconds of a chunk's weight gradient.")] = 1.0,
    hop: Annotated[float, typer.Option(help="Seconds of a message between ranks.")] = 0.0,
    csv: Annotated[
        Path | None, typer.Option(help="Write torch.distributed.pipelining's CSV into FILE.", metavar="FILE")
    ] = None,
    picture: Picture = None,
) -> None:
    """Build a schedule, simulate it and show it."""
    with _one_line_errors():
        built = catalog.build(name, ranks, microbatches, chunks)
        costs = Costs.uniform(built.placement, forward=f, input_gradient=i, weight_gradient=w, hop=hop)
        _show({name: simulate(built, costs)}, picture)
        if csv is not None:
            csv_file.write(built, csv)


@app.command()
def trace(
    files: Annotated[list[Path], typer.Argument(help="Files written by --pipeline-trace.")],
    picture: Picture = None,
) -> None:
    """Show what really ran: one or several recorded steps, one below the other."""
    from megatron_pp_ext.view import trace_file

    with _one_line_errors():
        steps = {f"{file.stem}: {(step := trace_file.read(file)).name}": step for file in files}
        _show({title: step.timeline() for title, step in steps.items()}, picture)
        peaks = Table("step", "measured peak of live activation bytes, rank by rank")
        for title, step in steps.items():
            peaks.add_row(title, "  ".join(f"{record.peak_bytes:,}" for record in step.records))
        console.print(peaks)


@app.command()
def doctor() -> None:
    """Say what this machine has: versions, and whether every seam into Megatron fits."""
    from megatron_pp_ext.doctor import examine

    raise typer.Exit(examine(console))


def _show(timelines: dict[str, Timeline], picture: Path | None) -> None:
    from megatron_pp_ext.view import terminal
    from megatron_pp_ext.view.picture import draw

    for timeline in timelines.values():
        console.print(terminal.show(timeline))
    console.print(terminal.summary_table(timelines))
    if picture is not None:
        draw(timelines, picture)


class _one_line_errors:
    """Turn a ValueError, whose message is made for users, into one line and exit code 2."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, ValueError | OSError):
            typer.echo(f"mpp: {error}", err=True)
            raise typer.Exit(2)
