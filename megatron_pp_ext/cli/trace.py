"""The command that shows recorded steps."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.progress import waiting
from megatron_pp_ext.cli.report import console, show


@app.command()
@ask.takes_groups
def trace(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files of --pipeline-trace, or of mpp schedule or mpp rehearse --trace."),
    ],
    processor_time: Annotated[
        bool,
        typer.Option(
            "--processor-time",
            help="Replay steps of CPUs with the processor time of each action, as on a core for every rank.",
        ),
    ] = False,
    *,
    pictures: ask.Pictures,
) -> None:
    """Show one or several recorded or simulated steps, and what the ranks waited for when they were idle.

    Idle times are in milliseconds: before a rank's first action (warm-up) and after its last
    (cool-down), waiting for an action on another rank to end (unfinished stages) or, when that had ended,
    for its message (late messages), for gradients to be reduced, or for neither (overhead).
    """
    from megatron_pp_ext.schedule.formats import trace_reading
    from megatron_pp_ext.schedule.replay import on_own_cores
    from megatron_pp_ext.view import terminal

    stems = [file.stem for file in files]
    titles = [file.stem if stems.count(file.stem) == 1 else str(file) for file in files]
    with waiting("reading traces"):
        read = [on_own_cores(step) if processor_time else step for step in map(trace_reading.read, files)]
    steps = {f"{title}: {step.name}": step for title, step in zip(titles, read, strict=True)}
    units = {step.units for step in read}
    if len(units) > 1:
        raise ValueError(
            f"the traces count time in {' and in '.join(sorted(unit.time for unit in units))}: look at them "
            "one by one"
        )
    with waiting("finding what the ranks waited for"):
        show({title: step.timeline() for title, step in steps.items()}, units.pop(), pictures.paths)
        for title, step in steps.items():
            for table in terminal.recorded_tables(title, step):
                console.print(table)
