"""``mpp partition``: cuts a profiled model into stages."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from megatron_pp_ext import amounts
from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.report import console
from megatron_pp_ext.files import write_json

if TYPE_CHECKING:
    from megatron_pp_ext.pipedream.partition.partitioner import Partition
    from megatron_pp_ext.pipedream.partition.recurrence import Level
    from megatron_pp_ext.schedule.formats.profile import Profile


@app.command()
def partition(
    profile: Annotated[
        Path, typer.Argument(help="From `mpp profile`, --profile-pipeline, or PipeDream's graph.txt.")
    ],
    workers: Annotated[int | None, typer.Option(help="Number of workers.")] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(help="What each worker's link carries a second, as in 25GB or 25e9.", metavar="SIZE"),
    ] = None,
    levels: Annotated[
        str | None,
        typer.Option(
            help="Nested machines, innermost first, in the place of --workers and --bandwidth: "
            "4x25GB,2x3.1GB is 2 machines with links of 3.1 GB/s, each with 4 workers with links of 25 GB/s.",
            metavar="NxB,...",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of each worker, as in 60GB or 6e10.  [default: no limit]", metavar="SIZE"),
    ] = None,
    state_per_weight: Annotated[
        float,
        typer.Option(
            help="Bytes of gradients and optimizer state for each byte of weights, which count against "
            "--memory: 3 for Adam in fp32."
        ),
    ] = 0.0,
    cost: Annotated[
        str,
        typer.Option(
            help="What limits a stage: links, its computation or what its full-duplex link sends for cuts "
            "and the all-reduce; paper, PipeDream's formula; reference, that of its public optimizer, whose "
            "answers may differ on graphs with branches and under --memory."
        ),
    ] = "links",
    straight: Annotated[bool, typer.Option("--straight", help="Give each stage one worker.")] = False,
    layout: Annotated[
        bool, typer.Option("--layout", help="Print only Megatron's --pipeline-model-parallel-layout.")
    ] = False,
    flags: Annotated[
        bool, typer.Option("--flags", help="Print only the flags of training, which mpp estimate takes, too.")
    ] = False,
    json: ask.Json = None,
) -> None:
    """Cut a model into stages for pipelining without a flush, with replicas where they help.

    This is PipeDream's partitioner, which minimises the seconds between microbatches over all workers.
    Weight versions, microbatches in flight and --state-per-weight count against --memory.
    """
    if layout and flags:
        raise ValueError("--layout and --flags print different parts of one answer: leave one of them out")
    from megatron_pp_ext.pipedream.partition.layout import layout_of, replicas_flag, training_flags
    from megatron_pp_ext.pipedream.partition.partitioner import partition as best_partition
    from megatron_pp_ext.schedule.formats import profile_file

    machines = _levels(workers, bandwidth, levels)
    limit = math.inf if memory is None else amounts.read(memory, "--memory")
    model = profile_file.read(profile)
    best = best_partition(
        model, machines, cost=cost, straight=straight, memory=limit, state_per_weight=state_per_weight
    )
    if json is not None:
        write_json(json, best.record(model))
    if layout:
        typer.echo(layout_of(best, model))
        if flag := replicas_flag(best):
            typer.echo(f"the stages have different numbers of replicas: add {flag}", err=True)
    elif flags:
        typer.echo(training_flags(best, model))
    else:
        _show(best, model)


def _levels(workers: int | None, bandwidth: str | None, levels: str | None) -> "list[Level]":
    from megatron_pp_ext.pipedream.partition.recurrence import Level

    if levels is None:
        if workers is None or bandwidth is None:
            missing = "--workers" if workers is None else "--bandwidth"
            raise ValueError(f"{missing} is missing: give --workers and --bandwidth, or --levels")
        return [Level(workers, amounts.read(bandwidth, "--bandwidth"))]
    if bandwidth is not None:
        raise ValueError(f"--bandwidth {bandwidth} and --levels contradict each other: leave one out")
    machines = []
    for level in levels.split(","):
        match = re.fullmatch(r"\s*(\d+)x([^x]+)", level)
        try:
            if match is None:
                raise ValueError
            machines.append(Level(int(match[1]), amounts.number(match[2])))
        except ValueError:
            raise ValueError(
                f"--levels has {level!r}, but must be workers x bytes a second: write 4x25GB,2x3.1GB"
            ) from None
    total = math.prod(level.workers for level in machines)
    if workers is not None and workers != total:
        raise ValueError(f"--workers is {workers}, but --levels {levels} has {total}: leave --workers out")
    return machines


def _show(best: "Partition", model: "Profile") -> None:
    from megatron_pp_ext.pipedream.partition.layout import is_megatrons, training_flags

    names = ("replicas", "seconds", "in flight", "bytes a worker")
    table = Table("stage", Column("layers", overflow="fold"), *names, box=SIMPLE_HEAD)
    for number, stage in enumerate(best.stages):
        first, last = model.layers[stage.layers[0]].name, model.layers[stage.layers[-1]].name
        count = f" ({len(stage.layers)})" if len(stage.layers) > 1 else ""
        table.add_row(
            str(number),
            (f"{first} .. {last}" if count else first) + count,
            str(stage.replicas),
            f"{stage.seconds:.4g}",
            str(stage.in_flight),
            f"{stage.memory_bytes:,.0f}",
        )
    console.print(table)
    console.print(f"between microbatches   {best.bottleneck_seconds:.6g} s, NOAM {best.noam}")
    console.print(f"data parallelism       {best.data_parallel_seconds:.6g} s: speedup {best.speedup:.3g}")
    console.print(f"one worker             {best.single_worker_seconds:.6g} s")
    if len(best.stages) > 1 and is_megatrons(model):
        typer.echo(f"train it with          {training_flags(best, model)}")
