"""The commands about this machine: ``mpp doctor``, ``activate``, ``deactivate`` and ``calibrate``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from megatron_pp_ext import startup_file
from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.report import console, waiting
from megatron_pp_ext.costs import system as systems
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.files import require_folder, write_whole
from megatron_pp_ext.processor import MOST_WAITED


@app.command()
def doctor(
    megatron: Annotated[
        Path | None,
        typer.Option(help="A Megatron-LM checkout to examine instead of the installed megatron-core."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="List versions, how messages go, and every hook too.")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(help="A module that the training script imports and that changes Megatron; may repeat."),
    ] = None,
) -> None:
    """Report what this machine lacks, and whether every hook into Megatron fits.

    The first line reports whether schedules can run here, and what they need. A table names the packages
    that have changed the functions which are hooked.
    """
    with waiting("importing torch"):
        from megatron_pp_ext.megatron.doctor import examine

    raise typer.Exit(examine(console, megatron, waiting, full, plugin or ()))


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


@app.command()
def calibrate(
    file: Annotated[Path, typer.Argument(help="The description to write, as JSON.")],
    like: Annotated[
        str | None,
        typer.Option(help="A system to copy what cannot be measured here from, such as the network."),
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Measure the cores of the CPU even if there are GPUs.")
    ] = False,
    accept_noise: Annotated[
        bool, typer.Option("--accept-noise", help="Take figures that a busy machine has disturbed, too.")
    ] = False,
) -> None:
    """Measure how fast this machine multiplies, copies and sends messages, in less than a minute.

    It measures the GPUs with NCCL, or else the CPU with gloo and one rank for each core, all ranks at once.
    Figures from a machine that was busy with something else are refused.
    """
    model = systems.read(like) if like is not None else None
    require_folder(file)
    import torch

    from megatron_pp_ext.calibration import ranks
    from megatron_pp_ext.calibration.ranks import described_system

    on_gpu = torch.cuda.is_available() and not cpu
    count = ranks.available(on_gpu)
    if count < 2 and model is None:
        raise ValueError(
            "one device has no links to measure; set --like to a system that has its links, "
            f"such as {systems.shipped()[0]}"
        )
    # The progress bar must not have a thread of its own, because ranks are forked meanwhile.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=ranks.parts(count))

        def report(done: str) -> None:
            progress.update(task, description=f"measured {done}", advance=1, refresh=True)

        try:
            figures, waited = ranks.calibrate(count, on_gpu, report)
        except RuntimeError as error:
            raise ValueError(f"{error}; correct it, or measure the CPU with --cpu") from None
    if waited is not None and waited > MOST_WAITED and not accept_noise:
        raise ValueError(
            f"the figures are not to be believed: a rank waited for a processor for {waited:.0%} of its "
            f"time, more than {MOST_WAITED:.0%}: end what else runs, or add --accept-noise"
        )
    described = described_system(figures, count, on_gpu, model)
    write_whole(file, described.to_json())
    _show(described)


def _show(system: System) -> None:
    table = Table("m", "n", "k", *(f"{name}, Gop/s" for name in system.matrix_rates), title=system.name)
    rates = [{tuple(shape): rate for *shape, rate in rows} for rows in system.matrix_rates.values()]
    for shape in rates[0]:
        cells = (f"{of_dtype[shape] / 1e9:,.1f}" if shape in of_dtype else "" for of_dtype in rates)
        table.add_row(*map(str, shape), *cells)
    console.print(table)
    console.print(f"copies {system.copy_bytes_per_second / 1e9:.4g} GB/s, read plus written")
    console.print(
        f"messages {system.node.bytes_per_second / 1e9:.4g} GB/s, {system.node.latency_seconds * 1e6:.4g} us"
    )
    for width, rate, keys in system.attention_rates:
        console.print(f"attention, heads of {width:.0f}: {rate / 1e9:,.1f} Gop/s, with {keys:,.0f} keys")
    collectives = Table("ranks", "bytes", "all-reduce, us", "all-gather, us", "all-to-all, us")
    for rows in zip(system.all_reduce, system.gather, system.all_to_all, strict=True):
        ranks, size, _ = rows[0]
        collectives.add_row(f"{ranks:.0f}", f"{size:,.0f}", *(f"{row[2] * 1e6:,.1f}" for row in rows))
    if system.all_reduce:
        console.print(collectives)
