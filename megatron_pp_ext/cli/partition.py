"""PipeDream's commands: ``mpp profile`` measures each layer, ``mpp partition`` cuts a profiled model into
stages.
"""

import math
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from megatron_pp_ext import amounts
from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.model import Model, PrintFlags, print_flags, to_be_started
from megatron_pp_ext.cli.report import console, waiting
from megatron_pp_ext.files import require_folder, write_json
from megatron_pp_ext.jobs.command import short_run, training, whole_number, words_of
from megatron_pp_ext.jobs.failure import reason

if TYPE_CHECKING:
    from megatron_pp_ext.pipedream.partition.partitioner import Partition
    from megatron_pp_ext.pipedream.partition.recurrence import Level
    from megatron_pp_ext.schedule.formats.profile import Profile


_STEPS, _MICROBATCHES = 4, 8
"""The first step warms up; medians are of the 24 microbatches of the others."""


@app.command()
def profile(
    file: Annotated[
        Path, typer.Argument(help="The profile, which is written if flags follow and read otherwise.")
    ],
    flags: Annotated[
        list[str] | None, typer.Argument(help="After --, the flags of a Megatron model to measure.")
    ] = None,
    model: Model = None,
    print_only: PrintFlags = False,
    script: ask.Script = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the profile that was read as JSON.", metavar="FILE")
    ] = None,
) -> None:
    """Measure every layer of a Megatron model in a few training steps of one process, or show a profile.

    mpp profile gpt.json --model llama3-8b -- --num-layers 2   measures, on the GPU or else the CPU; the
    training log goes to gpt.log

    mpp profile graph.txt   shows a profile; PipeDream's format is read too
    """
    from megatron_pp_ext.schedule.formats.profile import read, write

    if print_only:
        print_flags(to_be_started(flags, model).words)
        return
    if flags or model is not None:
        _measure(file, to_be_started(flags, model, script).words, script)
    elif script is not None:
        raise ValueError(f"--script {script} is for measuring: give --model or the model's flags after --")
    measured = read(file)
    if json is not None:
        write(measured, json)
    _show_profile(measured)


def training_flags(file: Path, flags: list[str]) -> list[str]:
    """Return the flags of a few steps of the model on one rank, which write their profile to ``file``.

    Raises ValueError for flags that contradict this.
    """
    words = words_of(flags)
    if "--save" in words:
        raise ValueError("--save would write a checkpoint of the profiled steps: leave it out")
    changed = {
        "--pipeline-model-parallel-size": 1,
        "--global-batch-size": _MICROBATCHES * whole_number(words, "--micro-batch-size"),
        "--profile-pipeline": file,
    }
    return short_run(flags, _STEPS, changed)


def _measure(file: Path, flags: list[str], script: Path | None) -> None:
    """Train for a few steps, with the log next to ``file``; ValueError if the run fails."""
    from megatron_pp_ext.jobs.process import run

    require_folder(file)
    log = file.with_suffix(".log")
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        written = Path(folder, file.name)
        words = training_flags(written, flags)
        with waiting(f"training for {_STEPS} steps, with the log in {log}"):
            status = run(training(words, ranks=1, script=script), log)
        if status or not written.exists():
            cause = reason(log.read_text(encoding="utf-8", errors="replace"))
            raise ValueError(
                f"the profiled run ended with status {status} and no profile: {cause} ({log}); correct the "
                "model's flags"
            )
        shutil.copyfile(written, file)
    console.print(f"The training log is in {log}", style="dim")


def _show_profile(model: "Profile") -> None:
    names = ("forward ms", "backward ms", "output MB", "kept MB", "weights MB")
    columns = (Column(name, justify="right") for name in names)
    table = Table(Column("layer", overflow="fold"), *columns, box=SIMPLE_HEAD)
    for layer in model.layers:
        table.add_row(
            layer.name,
            f"{layer.forward_seconds * 1e3:.4g}",
            f"{layer.backward_seconds * 1e3:.4g}",
            f"{layer.activation_bytes / 1e6:.4g}",
            f"{layer.kept_bytes / 1e6:.4g}",
            f"{layer.parameter_bytes / 1e6:.4g}",
        )
    console.print(table)
    shape = "a chain" if model.is_chain else f"a graph with {len(model.edges)} edges"
    console.print(f"{len(model.layers)} layers, {shape}, {model.seconds:.6g} s a microbatch")


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
    from megatron_pp_ext.pipedream.partition.partitioner import layout_of, replicas_flag, training_flags
    from megatron_pp_ext.pipedream.partition.partitioner import partition as best_partition
    from megatron_pp_ext.schedule.formats.profile import read

    machines = _levels(workers, bandwidth, levels)
    limit = math.inf if memory is None else amounts.read(memory, "--memory")
    model = read(profile)
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
    from megatron_pp_ext.pipedream.partition.partitioner import is_megatrons, training_flags

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
