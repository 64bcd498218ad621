"""``mpp activate`` and ``mpp deactivate``: schedules for programs that know nothing of this package."""

from megatron_pp_ext import startup_file
from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.report import console


@app.command()
def activate() -> None:
    """Let every program of this environment that imports megatron.core follow MEGATRON_PP_SCHEDULE.

    It writes one file into site-packages. Without the variable a program runs as before.
    """
    console.print(
        f"{startup_file.activate()} is read at every start of this environment's Python.", soft_wrap=True
    )
    console.print(
        "A schedule is in force where MEGATRON_PP_SCHEDULE is set, with MEGATRON_PP_RANKS and "
        "MEGATRON_PP_MICROBATCHES; mpp deactivate undoes this."
    )


@app.command()
def deactivate() -> None:
    """Undo mpp activate: MEGATRON_PP_SCHEDULE has no effect from then on."""
    was_active = startup_file.deactivate()
    console.print(
        "MEGATRON_PP_SCHEDULE is no longer followed." if was_active else "There was nothing to undo."
    )
