"""The program ``mpp``, and the command that lists schedules.  Other files add a command each."""

from collections.abc import Sequence
from typing import Annotated

import typer

from megatron_pp_ext.cli.errors import OneLineErrors
from megatron_pp_ext.cli.report import console
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.names import ALIASES, OTHERS
from megatron_pp_ext.version import VERSION

app = typer.Typer(
    cls=OneLineErrors,
    help="Pipeline schedules for Megatron-LM.",
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Pipeline schedules for Megatron-LM."""
    if version:
        console.print(f"megatron_pp_ext {VERSION}")
        raise typer.Exit


@app.command("list")
def list_schedules() -> None:
    """List the schedules that --pipeline-schedule accepts."""
    from megatron_pp_ext.view import terminal

    rows: list[Sequence[str]] = [
        (entry.name, entry.summary, entry.shape, entry.chunks_phrase, entry.paper)
        for entry in catalog.ENTRIES.values()
    ]
    rows += [(other.name, other.summary, other.placement, other.chunks, other.source) for other in OTHERS]
    console.print(terminal.schedule_table(rows))
    aliases = ", ".join(f"{alias} = {name}" for alias, name in ALIASES.items())
    console.print(f"Elsewhere called: {aliases}", style="dim")
