"""``mpp rehearse``: the step time and memory of a pipeline, before there are machines for it."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import batched
from pathlib import Path
from typing import Annotated

import typer

from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.model import Model, PrintFlags, print_flags, to_be_started
from megatron_pp_ext.cli.report import console, show_by_rank, waiting
from megatron_pp_ext.costs import system as systems
from megatron_pp_ext.files import require_folder, write_json
from megatron_pp_ext.job import stage_costs
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.sizes import fewest_ranks, smallest_world
from megatron_pp_ext.jobs.command import short_run, training, without, words_of
from megatron_pp_ext.planner import rehearsal as rehearsal_noise
from megatron_pp_ext.planner.rehearsal import Rehearsal, chosen_ranks, put_together
from megatron_pp_ext.planner.search import launch_lines
from megatron_pp_ext.schedule.costs import as_written
from megatron_pp_ext.schedule.formats import costs_file, csv_file, rehearsal_file
from megatron_pp_ext.schedule.formats.rehearsal_file import RankRehearsal

_WARM_UP = 1
"""The first step counts bytes; the others are timed."""


@app.command()
def rehearse(
    flags: Annotated[list[str] | None, typer.Argument(help="After --, the flags of the planned job.")] = None,
    model: Model = None,
    print_only: PrintFlags = False,
    ranks: Annotated[
        str, typer.Option(help="Pipeline ranks to run: first, middle, last, all or numbers, with commas.")
    ] = "first,middle,last",
    iterations: Annotated[int, typer.Option(help="Steps to time on each rank.")] = 4,
    world_size: Annotated[
        int | None, typer.Option(help="Ranks of the job.  [default: as few as the flags need]")
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            help="The machines of the job, for its messages and collectives; without it they take no time."
        ),
    ] = None,
    at_once: Annotated[
        int, typer.Option(help="Ranks to run at the same time; on CPUs, as many as will share their memory.")
    ] = 1,
    accept_noise: Annotated[
        bool, typer.Option("--accept-noise", help="Take seconds that a busy machine has disturbed, too.")
    ] = False,
    script: ask.Script = None,
    json: ask.Json = None,
    costs: Annotated[
        Path | None,
        typer.Option(help="Write the costs of every stage, for --pipeline-costs.", metavar="FILE"),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the simulated step for ui.perfetto.dev.", metavar="FILE")
    ] = None,
) -> None:
    """Run ranks of a pipeline one by one on this machine, and simulate the step of all of them together.

    Each rank runs its own share of the job for a few steps, on dummy tensors from its neighbours.
    Checkpoints are neither read nor written.  A rank that is not run is assumed to be like the middle one.
    Seconds from a machine that was busy with something else are refused.

    mpp rehearse --model llama3-8b -- --pipeline-model-parallel-size 8 --pipeline-schedule v-half ...
    """
    from megatron_pp_ext.jobs.process import run_together

    described = to_be_started(flags, model, script)
    words = described.words
    if print_only:
        print_flags(words)
        return
    require_folder(json, costs, trace)
    machine = systems.read(system) if system is not None else None
    job = described.job
    size = job.parallel.pipeline_model_parallel_size
    if size < 2:
        raise ValueError(
            f"a rehearsal needs a pipeline, got --pipeline-model-parallel-size {size}; set it to 2 or more"
        )
    if iterations < 2 or at_once < 1:
        raise ValueError(
            f"--iterations wants 2 or more, --at-once 1 or more, got {iterations} and {at_once}; raise them"
        )
    world = world_size or smallest_world(job)
    chosen = chosen_ranks(ranks, size)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        files = {rank: Path(folder, f"{rank}.json") for rank in chosen}
        environments = {
            rank: {**launch_lines.environment(words), **environment(job, rank, world)} for rank in chosen
        }
        for batch in batched(chosen, at_once):
            commands = {
                rank: (
                    training(rehearsal_flags(words, iterations, files[rank]), ranks=None, script=script),
                    environments[rank],
                )
                for rank in batch
            }
            with waiting(f"rehearsing rank {', '.join(map(str, batch))} of {size}"):
                run_together(commands, {rank: files[rank].with_suffix(".log") for rank in batch})
        measured = {rank: rehearsal_file.read(file) for rank, file in files.items()}
        first = measured[chosen[0]]
        schedule = replace(csv_file.read(files[chosen[0]].with_suffix(".csv")), name=first.schedule)
    rehearsal = put_together(measured, schedule, machine, world)
    _show_bytes(rehearsal, measured)
    console.print(rehearsal_noise.described(measured.values()))
    if not accept_noise:
        rehearsal_noise.require_quiet(measured.values())
    _show_seconds(rehearsal)
    if costs is not None:
        sizes = stage_costs.sizes(job)
        costs_file.write(replace(rehearsal.timeline.costs, sizes=sizes), costs)
    if json is not None:
        write_json(json, numbers(rehearsal, measured))
    if trace is not None:
        from megatron_pp_ext.schedule.formats import trace_file

        trace_file.write_timeline(trace, rehearsal.timeline)


def environment(job: RequestedJob, rank: int, world: int) -> dict[str, str]:
    """Return the variables of torch.distributed for the first process of pipeline ``rank``."""
    size, copy = job.parallel.pipeline_model_parallel_size, fewest_ranks(job)
    if world < 1 or world % copy:
        raise ValueError(
            f"--world-size {world} is not a multiple of {copy}, the ranks of one copy of the model; "
            "correct it"
        )
    distance = copy // size if job.flags.use_tp_pp_dp_mapping else world // size
    variables = {
        "RANK": rank * distance,
        "WORLD_SIZE": world,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,  # unused: the fake process group has no store to share
    }
    return {name: str(value) for name, value in variables.items()}


def rehearsal_flags(flags: Sequence[str], iterations: int, file: Path) -> list[str]:
    """Return the flags of a rehearsal of ``flags`` that writes ``file``."""
    training_flags = list(without(flags))
    words = words_of(flags)
    fixed_scale = ["--loss-scale", "1"] if "--fp16" in words else []
    if fixed_scale and "--loss-scale" not in words:
        # Under a scale that adapts itself Megatron makes none of these checks.
        fixed_scale.append("--no-check-for-nan-in-loss-and-grad")
    changed = {"--rehearse-pipeline": file}
    return [*short_run(training_flags, _WARM_UP + iterations, changed), "--fake-process-group", *fixed_scale]


def numbers(rehearsal: Rehearsal, measured: Mapping[int, RankRehearsal]) -> dict[str, object]:
    """Return the content of the file of --json.

    Seconds and what disturbed them, bytes, and for each rank which one was measured in its place.
    """
    timeline = rehearsal.timeline
    return {
        "schedule": timeline.schedule.name,
        "microbatches": timeline.schedule.microbatches,
        "step_seconds": rehearsal.step_seconds,
        "pipeline_seconds": rehearsal.pipeline_seconds,
        "outside_seconds": rehearsal.outside_seconds,
        "bubble": timeline.bubble,
        "ranks": [{**asdict(rank), "total": rank.total} for rank in rehearsal.ranks],
        "device_bytes": {rank: rehearsed.device_bytes for rank, rehearsed in measured.items()},
        "disturbed": rehearsal_noise.disturbance(measured.values()),
        "costs": as_written(timeline.costs),
    }


def _show_bytes(rehearsal: Rehearsal, measured: Mapping[int, RankRehearsal]) -> None:
    rows: dict[str, list[str]] = {"run as rank": [str(memory.rehearsed_on) for memory in rehearsal.ranks]}
    for name in ("weights", "gradients", "optimizer", "activations", "messages", "total"):
        rows[name] = [f"{getattr(memory, name) / 2**20:,.1f}" for memory in rehearsal.ranks]
    device = {rank: rehearsed.device_bytes for rank, rehearsed in measured.items() if rehearsed.device_bytes}
    if device:
        peaks = (device.get(rank) for rank in range(len(rehearsal.ranks)))
        rows["device peak"] = [f"{peak / 2**20:,.1f}" if peak else "" for peak in peaks]
    show_by_rank("MiB on rank", rows)


def _show_seconds(rehearsal: Rehearsal) -> None:
    from megatron_pp_ext.view import terminal

    timeline = rehearsal.timeline
    console.print(terminal.Sketch(timeline))
    console.print(
        f"a step takes {rehearsal.step_seconds:.4g} s: {rehearsal.pipeline_seconds:.4g} s of pipeline "
        f"(bubble {timeline.bubble:.1%}, {timeline.schedule.microbatches} microbatches) and "
        f"{rehearsal.outside_seconds:.4g} s of optimizer and all else"
    )
