"""``mpp estimate``: how long a step takes and what every rank keeps, before a cluster is booked."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.report import console

if TYPE_CHECKING:
    from megatron_pp_ext.planner.step.estimate import Estimate
    from megatron_pp_ext.planner.system import System
    from megatron_pp_ext.request.pipeline import Request

SystemName = Annotated[
    str, typer.Option("--system", help="a100-80g, h100, h200, mi300x, or what mpp calibrate wrote.")
]
ModelFile = Annotated[
    Path | None, typer.Option("--model", help="The model as JSON, in place of flags.", metavar="FILE")
]
Flags = Annotated[list[str] | None, typer.Argument(help="Behind --: Megatron's flags.")]
Margin = Annotated[
    float, typer.Option(help="For what allocators leave unused: a fraction of what comes and goes.")
]


@app.command()
def estimate(
    flags: Flags = None,
    system: SystemName = "h100",
    world_size: Annotated[int | None, typer.Option(help="GPUs.  [default: one replica of the model]")] = None,
    model: ModelFile = None,
    margin: Margin = 0.05,
    json: ask.Json = None,
) -> None:
    """Estimate a training step of a Megatron model: its time, and the memory of every rank.

    mpp estimate --system h100 --world-size 64 -- --num-layers 32 --hidden-size 4096 ...
    """
    from megatron_pp_ext.planner import system as systems
    from megatron_pp_ext.planner.step.estimate import estimate_request
    from megatron_pp_ext.request.pipeline import for_world

    ask.require_at_least("--margin", margin, 0)
    machine = systems.read(system)
    args, _ = described(flags, model)
    one = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    gpus = one if world_size is None else world_size
    if gpus < 1:
        raise ValueError(f"--world-size is {gpus}, but must be 1 or more: raise it")
    request = for_world(args, gpus)
    found = estimate_request(args, machine, request, margin)
    show(found, request, machine, gpus)
    if json is not None:
        content = {
            "system": machine.name,
            "gpus": gpus,
            "schedule": request.schedule,
            "microbatches": request.microbatches,
            "data_parallel_size": request.data,
            **asdict(found),
        }
        json.write_text(dumps(content, indent=1) + "\n", encoding="utf-8")


def described(
    flags: list[str] | None, model: Path | None, sizes: Mapping[str, int | None] | None = None
) -> tuple[Namespace, list[str]]:
    """The model that the command line describes, one way or the other, and its flags.

    ``sizes`` are given by options, under the names of arguments.  ValueError where there is no model, and
    for what contradicts itself.
    """
    sizes = sizes or {}
    if model is not None:
        if flags:
            raise ValueError(f"--model {model} and flags behind -- contradict each other: leave one out")
        from megatron_pp_ext.planner.search.candidate import spelled
        from megatron_pp_ext.planner.step import model_description as planners

        args, values = planners.read(model, sizes)
        return args, spelled(values)
    if not flags:
        raise ValueError("no model: give Megatron's flags behind --, or a JSON with --model")
    words = _joined(flags, sizes)
    import warnings

    with console.status("asking Megatron's parser"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron_pp_ext.integration.request import launch_flags

        return launch_flags.read_flags(words), words


def _joined(flags: list[str], sizes: Mapping[str, int | None]) -> list[str]:
    """``flags`` with the sizes that options give; ValueError where both say something else."""
    words = list(flags)
    parts = [part for word in words for part in word.split("=", 1)]
    for name, value in sizes.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if flag not in parts:
            words += [flag, str(value)]
        elif (behind := parts[parts.index(flag) + 1 : parts.index(flag) + 2]) != [str(value)]:
            raise ValueError(
                f"{flag} is {value}, but {' '.join(behind) or 'nothing'} behind --: leave one out"
            )
    return words


def show(found: "Estimate", request: "Request", machine: "System", gpus: int) -> None:
    """Time in a few lines, memory as a table."""
    tokens = found.tokens_per_second / gpus
    console.print(
        f"{request.schedule} on {gpus} x {machine.name}, {request.data} data-parallel, "
        f"{request.microbatches} microbatches\n"
        f"step {found.step_seconds:.4g} s: pipeline {found.pipeline_seconds:.4g} s, reductions and update "
        f"{found.other_seconds:.4g} s\n"
        f"MFU {found.utilisation:.1%}, bubble {found.bubble:.1%}, {tokens:,.0f} tokens/s a GPU"
    )
    names = [name for name, _ in found.fullest.components()]
    used = [name for name in names if any(getattr(rank, name) for rank in found.ranks)]
    table = Table("rank", *used, "total GB", title="Memory of every pipeline rank, in GB")
    for number, rank in enumerate(found.ranks):
        values = (f"{getattr(rank, name) / 1e9:.2f}" for name in used)
        table.add_row(str(number), *values, f"{rank.total / 1e9:.2f}")
    console.print(table)
    fullest = found.fullest
    if fullest.total > machine.memory_bytes:
        largest = max(fullest.components(), key=lambda pair: pair[1])
        console.print(
            f"does not fit: rank {found.ranks.index(fullest)} needs {fullest.total / 1e9:.1f} GB of "
            f"{machine.memory_bytes / 1e9:.0f} GB, {largest[1] / 1e9:.1f} GB of it {largest[0]}"
        )
