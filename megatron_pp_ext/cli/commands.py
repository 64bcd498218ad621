"""The commands of ``mpp``, one function each."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.errors import OneLineErrors
from megatron_pp_ext.cli.report import bound_of, console, report, show
from megatron_pp_ext.request.pipeline import named
from megatron_pp_ext.schedule import catalog, csv_file
from megatron_pp_ext.schedule.names import ALIASES, FLEX, OTHERS
from megatron_pp_ext.schedule.simulate import simulate

app = typer.Typer(
    cls=OneLineErrors,
    help="Pipeline schedules for Megatron-LM.",
    add_completion=False,
    rich_markup_mode=None,
)


@app.command("list")
def list_schedules() -> None:
    """List the schedules that --pipeline-schedule accepts."""
    table = Table("schedule", "what it does", "placement", "chunks a rank", "source")
    for entry in catalog.ENTRIES.values():
        table.add_row(entry.name, entry.summary, entry.shape, entry.chunks_phrase, entry.paper)
    for other in OTHERS:
        table.add_row(other.name, other.summary, other.placement, other.chunks, other.source)
    console.print(table)
    aliases = ", ".join(f"{alias} = {name}" for alias, name in ALIASES.items())
    console.print(f"Elsewhere called: {aliases}", style="dim")


@app.command()
@ask.takes_groups
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
            help="For flex: the memory of a rank.  Up to 8 it is a fraction of the activations that 1f1b "
            "keeps on its first rank, and messages come on top; a larger one is in the unit of the costs' "
            "activations, and holds messages too."
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            help="For flex: how many orders to try; 8000 search eight times as long as the default."
        ),
    ] = None,
    *,
    times: ask.Times,
    files: ask.Files,
) -> None:
    """Build a schedule, simulate it and show it.  Seconds are those of one action of one chunk."""
    if name == FLEX:
        from megatron_pp_ext.cli import flex

        with console.status("compiling"):
            found = flex.compiled(ranks, microbatches, chunks, memory_limit, times.costs, trials)
        report(found.timeline, found.lower_bound, files)
        console.print(f"found by: {found.origin}")
        return
    if memory_limit is not None:
        raise ValueError(f"--memory-limit is for flex, {name} has its own memory: leave it out, or use flex")
    if trials is not None:
        raise ValueError(f"--trials is for flex, {name} is not searched for: leave it out, or use flex")
    request = named(name, ranks, microbatches, chunks)
    built = catalog.build(request.schedule, ranks, microbatches, request.placement.chunks)
    timeline = simulate(built, times.costs(built.placement.stages))
    report(timeline, bound_of(timeline), files)


@app.command("simulate")
@ask.takes_groups
def simulate_file(
    file: Annotated[Path, typer.Argument(help="A schedule as CSV: a row a rank, cells such as 3F0.")],
    *,
    times: ask.Times,
    files: ask.Files,
) -> None:
    """Check a schedule from a file, simulate it and show it."""
    read = csv_file.read(file)
    timeline = simulate(read, times.costs(read.placement.stages))
    report(timeline, bound_of(timeline), files)


@app.command()
@ask.takes_groups
def compare(
    ranks: ask.Ranks = 4,
    microbatches: ask.Microbatches = 8,
    *,
    times: ask.Times,
    pictures: ask.Pictures,
) -> None:
    """Compare all schedules of one or two chunks a rank: a table, and a picture of memory and step time.

    Seconds are those of one action where a rank holds two chunks; where it holds one, an action takes
    twice as long.
    """
    from megatron_pp_ext.cli import flex
    from megatron_pp_ext.view import terminal

    catalog.build("1f1b", ranks, microbatches)  # refuses sizes before costs are made for them
    halves = times.costs(2 * ranks)
    named = {
        name: simulate(built, halves.merged(built.placement.stages))
        for name, entry in catalog.ENTRIES.items()
        if entry.chunks <= 2
        for built in (catalog.build(name, ranks, microbatches),)
    }
    with console.status("compiling"):
        found = {
            f"flex {fraction:.2f}": compiled.timeline
            for fraction, compiled in flex.some_limits(ranks, microbatches, halves).items()
        }
    console.print(terminal.summary_table(named | found))
    console.print("flex 0.50: compiled for half of 1f1b's activations on its first rank", style="dim")
    if pictures.paths:
        from megatron_pp_ext.view import memory_tradeoff

        work = microbatches * max(
            stage.forward + stage.input_gradient + stage.weight_gradient
            for stage in halves.merged(ranks).stages
        )
        title = f"{ranks} ranks, {microbatches} microbatches"
        for path in pictures.paths:
            memory_tradeoff.draw_schedules(named, flex.undominated(list(found.values())), work, path, title)


@app.command()
@ask.takes_groups
def trace(
    files: Annotated[list[Path], typer.Argument(help="Files written by --pipeline-trace.")],
    *,
    pictures: ask.Pictures,
) -> None:
    """Show one or several recorded steps, and what the ranks waited for when they were idle.

    Idle times are in milliseconds: before a rank's first action (warm-up) and after its last
    (cool-down), waiting for an action on another rank to end (unfinished stages) or, when that had ended,
    for its message (late messages), for gradients to be reduced, or for neither (overhead).
    """
    from megatron_pp_ext.view import terminal, trace_file

    stems = [file.stem for file in files]
    titles = [file.stem if stems.count(file.stem) == 1 else str(file) for file in files]
    read = map(trace_file.read, files)
    steps = {f"{title}: {step.name}": step for title, step in zip(titles, read, strict=True)}
    show({title: step.timeline() for title, step in steps.items()}, pictures.paths)
    peaks = Table("step", "measured peak of live activation bytes, rank by rank")
    for title, step in steps.items():
        peaks.add_row(title, "  ".join(f"{record.peak_bytes:,}" for record in step.records))
        on_device = [f"{record.device_bytes:,}" for record in step.records if record.device_bytes]
        if on_device:
            peaks.add_row(f"{title}, all that its device held", "  ".join(on_device))
    console.print(peaks)
    for step in steps.values():
        console.print(terminal.idle_table(step))


@app.command()
def doctor(
    megatron: Annotated[
        Path | None,
        typer.Option(help="A Megatron-LM checkout to examine instead of the installed megatron-core."),
    ] = None,
) -> None:
    """Report what this machine has and lacks, and whether every seam into Megatron fits."""
    from megatron_pp_ext.integration.doctor import examine

    raise typer.Exit(examine(console, megatron))
