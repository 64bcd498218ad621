"""``mpp calibrate``: this machine, measured, as a system for ``--system``."""

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.report import console
from megatron_pp_ext.files import require_folder
from megatron_pp_ext.planner import system as systems
from megatron_pp_ext.planner.system import Link, System

if TYPE_CHECKING:
    from megatron_pp_ext.calibration.ranks import Findings


@app.command()
def calibrate(
    file: Annotated[Path, typer.Argument(help="The description to write, as JSON.")],
    like: Annotated[
        str | None,
        typer.Option(help="A system from which to take what cannot be measured here, such as the network."),
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Measure the CPU's cores although there are GPUs.")
    ] = False,
) -> None:
    """Measure how fast this machine multiplies, copies and talks, in less than a minute.

    On the GPUs with NCCL, else on the CPU with gloo, a rank a core.  All ranks measure at the same time.
    """
    model = systems.read(like) if like is not None else None
    require_folder(file)
    import torch

    from megatron_pp_ext.calibration import ranks

    on_gpu = torch.cuda.is_available() and not cpu
    count = ranks.available(on_gpu)
    if count < 2 and model is None:
        raise ValueError(
            "one device has no other to talk to; set --like to a system that has its links, "
            f"such as {systems.shipped()[0]}"
        )
    # Without a thread to refresh it: ranks are forked meanwhile.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=ranks.parts(count))

        def heard(done: str) -> None:
            progress.update(task, description=f"measured {done}", advance=1, refresh=True)

        try:
            found = ranks.calibrate(count, on_gpu, heard)
        except RuntimeError as error:
            raise ValueError(f"{error}; correct it, or measure the CPU with --cpu") from None
    described = describe(found, count, on_gpu, model)
    file.write_text(described.to_json(), encoding="utf-8")
    _show(described)


def describe(found: "Findings", ranks: int, on_gpu: bool, like: System | None) -> System:
    """The system that ``found`` was measured on; the network and what else was not measured is ``like``'s.

    Without ``like`` the network is taken to be as quick as the links within the machine.
    """
    import psutil
    import torch

    if on_gpu:
        about = torch.cuda.get_device_properties(0)
        name, memory, transport = about.name, about.total_memory, "NCCL"
    else:
        name, memory, transport = "cpu", psutil.virtual_memory().total // ranks, "gloo"
    how = f"measured on {date.today()} by mpp calibrate, {ranks} rank(s) at once"
    sources = {
        "memory_bytes": "asked of the device" if on_gpu else "the machine's, shared by its cores",
        "matrix_rates": how,
        "copy_bytes_per_second": how,
    }
    if found.bytes_per_second is None or found.latency_seconds is None:
        assert like is not None
        node, sources["node"] = like.node, f"{like.name}'s: one device has no link to measure"
    else:
        node, sources["node"] = (
            Link(found.bytes_per_second, found.latency_seconds),
            f"{how}, over {transport}",
        )
        sources["all_reduce"] = sources["node"]
    network, sources["network"] = node, "not measured: taken to be as within the machine"
    if like is not None:
        network, sources["network"] = like.network, f"{like.name}'s: not measured"
    measured = System(
        name=name,
        gpus_per_node=ranks,
        memory_bytes=float(memory),
        matrix_rates=found.matrix_rates,
        copy_bytes_per_second=found.copy_bytes_per_second,
        node=node,
        network=network,
        all_reduce=found.all_reduce,
        sources=sources,
    )
    if like is None:
        return measured
    sources["peak_rates"] = f"{like.name}'s"
    per_node = max(ranks, like.gpus_per_node)
    sources["gpus_per_node"] = f"{like.name}'s" if per_node > ranks else how
    return replace(measured, peak_rates=like.peak_rates, gpus_per_node=per_node)


def _show(system: System) -> None:
    table = Table("m", "n", "k", *(f"{name}, Gop/s" for name in system.matrix_rates), title=system.name)
    for rows in zip(*system.matrix_rates.values(), strict=True):
        table.add_row(*map(str, rows[0][:3]), *(f"{row[3] / 1e9:,.1f}" for row in rows))
    console.print(table)
    console.print(f"copies {system.copy_bytes_per_second / 1e9:.4g} GB/s, read plus written")
    console.print(
        f"messages {system.node.bytes_per_second / 1e9:.4g} GB/s, {system.node.latency_seconds * 1e6:.4g} us"
    )
    reduced = Table("ranks", "bytes", "all-reduce, us")
    for ranks, size, seconds in system.all_reduce:
        reduced.add_row(f"{ranks:.0f}", f"{size:,.0f}", f"{seconds * 1e6:,.1f}")
    if system.all_reduce:
        console.print(reduced)
