"""The command that examines this machine."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.progress import waiting
from megatron_pp_ext.cli.report import console


@app.command()
def doctor(
    megatron: Annotated[
        Path | None,
        typer.Option(help="A Megatron-LM checkout to examine instead of the installed megatron-core."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="List versions, how messages go, and every hook too.")
    ] = False,
) -> None:
    """Report what this machine lacks, and whether every hook into Megatron fits.

    The first line reports whether schedules can run here, and what they need.
    """
    with waiting("importing torch"):
        from megatron_pp_ext.integration.doctor import examine

    raise typer.Exit(examine(console, megatron, waiting, full))
