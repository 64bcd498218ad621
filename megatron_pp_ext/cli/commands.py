"""The commands of ``mpp``, one function each."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.errors import OneLineErrors
from megatron_pp_ext.cli.report import Files, bound_of, console, report, show
from megatron_pp_ext.schedule import catalog, csv_file
from megatron_pp_ext.schedule.simulate import simulate

app = typer.Typer(
    cls=OneLineErrors,
    help="Pipeline schedules for Megatron-LM.",
    add_completion=False,
    rich_markup_mode=None,
)


@app.command("list")
def list_schedules() -> None:
    """The schedules that --pipeline-schedule accepts."""
    table = Table("schedule", "what it does", "placement", "chunks a rank", "source")
    for entry in catalog.ENTRIES.values():
        chunks = f"{entry.chunks} or more" if entry.any_chunks else str(entry.chunks)
        table.add_row(entry.name, entry.summary, entry.shape, chunks, entry.paper)
    table.add_row(
        "flex",
        "the shortest found for your costs and --memory-limit",
        "any",
        "1 or more",
        "mpp schedule flex",
    )
    console.print(table)
    aliases = ", ".join(f"{alias} = {name}" for alias, name in catalog.ALIASES.items())
    console.print(f"Elsewhere called: {aliases}", style="dim")


@app.command()
def schedule(
    name: Annotated[str, typer.Argument(help="A name from `mpp list`.")],
    ranks: ask.Ranks = 4,
    microbatches: ask.Microbatches = 8,
    chunks: Annotated[
        int | None, typer.Option(help="Stages a rank, where the schedule leaves it open.")
    ] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option(
            help="For flex: what a rank may keep, as a fraction of 1f1b's peak on its first rank (up to 8), "
            "or in the unit of the costs' activations."
        ),
    ] = None,
    f: ask.Forward = None,
    i: ask.InputGradient = None,
    w: ask.WeightGradient = None,
    hop: ask.Hop = None,
    costs: ask.CostsFile = None,
    csv: ask.Csv = None,
    json: ask.Json = None,
    svg: ask.Svg = None,
    png: ask.Png = None,
    trace: ask.Trace = None,
) -> None:
    """Build a schedule, simulate it and show it.  Seconds are of one chunk's action on one rank."""
    times = ask.Times(f, i, w, hop, costs)
    files = Files(csv, json, ask.pictures(svg, png), trace)
    if name == "flex":
        from megatron_pp_ext.cli import flex

        chunks = 2 if chunks is None else chunks
        if ranks < 2 or chunks < 1:
            raise ValueError(
                f"flex got {ranks} rank(s) with {chunks} chunks each, but needs 2 and 1 or more: raise them"
            )
        with console.status("compiling"):
            found = flex.compiled(ranks, microbatches, times.costs(ranks * chunks), memory_limit)
        report(found.timeline, found.lower_bound, files)
        console.print(f"found by: {found.origin}")
        return
    if memory_limit is not None:
        raise ValueError(f"--memory-limit is for flex, {name} has its own memory: leave it out, or use flex")
    built = catalog.build(name, ranks, microbatches, chunks)
    timeline = simulate(built, times.costs(built.placement.stages))
    report(timeline, bound_of(timeline), files)


@app.command("simulate")
def simulate_file(
    file: Annotated[Path, typer.Argument(help="A schedule as CSV: a row a rank, cells such as 3F0.")],
    f: ask.Forward = None,
    i: ask.InputGradient = None,
    w: ask.WeightGradient = None,
    hop: ask.Hop = None,
    costs: ask.CostsFile = None,
    csv: ask.Csv = None,
    json: ask.Json = None,
    svg: ask.Svg = None,
    png: ask.Png = None,
    trace: ask.Trace = None,
) -> None:
    """Check a schedule from a file, simulate it and show it."""
    times = ask.Times(f, i, w, hop, costs)
    files = Files(csv, json, ask.pictures(svg, png), trace)
    read = csv_file.read(file)
    timeline = simulate(read, times.costs(read.placement.stages))
    report(timeline, bound_of(timeline), files)


@app.command()
def compare(
    ranks: ask.Ranks = 4,
    microbatches: ask.Microbatches = 8,
    f: ask.Forward = None,
    i: ask.InputGradient = None,
    w: ask.WeightGradient = None,
    hop: ask.Hop = None,
    costs: ask.CostsFile = None,
    svg: ask.Svg = None,
    png: ask.Png = None,
) -> None:
    """All schedules for one model: a table, and a picture of memory against step time.

    Seconds are of one chunk's action where a rank holds two chunks; with one, it takes twice as long.
    """
    from megatron_pp_ext.cli import flex
    from megatron_pp_ext.view import terminal

    times = ask.Times(f, i, w, hop, costs)
    pictures = ask.pictures(svg, png)
    catalog.build(catalog.NAMES[0], ranks, microbatches)  # refuses sizes before costs are made for them
    halves = times.costs(2 * ranks)
    named = {
        name: simulate(built, halves.merged(built.placement.stages))
        for name in catalog.NAMES
        for built in (catalog.build(name, ranks, microbatches),)
    }
    with console.status("compiling"):
        found = {
            f"flex {fraction:.2f}": compiled.timeline
            for fraction, compiled in flex.frontier(ranks, microbatches, halves)
        }
    console.print(terminal.summary_table(named | found))
    console.print("flex 0.50: compiled for half of 1f1b's peak on its first rank", style="dim")
    if pictures:
        from megatron_pp_ext.view import frontier

        work = microbatches * max(
            stage.forward + stage.input_gradient + stage.weight_gradient
            for stage in halves.merged(ranks).stages
        )
        title = f"{ranks} ranks, {microbatches} microbatches"
        for path in pictures:
            frontier.draw(named, flex.undominated(list(found.values())), work, path, title)


@app.command()
def trace(
    files: Annotated[list[Path], typer.Argument(help="Files written by --pipeline-trace.")],
    svg: ask.Svg = None,
    png: ask.Png = None,
) -> None:
    """Show what really ran: one or several recorded steps, one below the other."""
    from megatron_pp_ext.view import trace_file

    pictures = ask.pictures(svg, png)
    steps = {f"{file.stem}: {(step := trace_file.read(file)).name}": step for file in files}
    show({title: step.timeline() for title, step in steps.items()}, pictures)
    peaks = Table("step", "measured peak of live activation bytes, rank by rank")
    for title, step in steps.items():
        peaks.add_row(title, "  ".join(f"{record.peak_bytes:,}" for record in step.records))
    console.print(peaks)


@app.command()
def doctor() -> None:
    """Say what this machine has: versions, and whether every seam into Megatron fits."""
    from megatron_pp_ext.doctor import examine

    raise typer.Exit(examine(console))
