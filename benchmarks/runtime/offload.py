"""How much longer than planned is a step whose activations wait on the host?  (two CPU cores, gloo)

    python -m benchmarks.runtime.offload [--ranks 4] [--repeats 3]

Stages sleep, and so do copies, each way on a thread of its own.  Every family runs with the copies that
``features.offload.copies`` plans for a share.  Writes results/offload_runtime.md.
"""

import gc
import time
from dataclasses import replace
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.runtime.machine import cores_awake, pin_to_core
from benchmarks.runtime.stages import SleepingLayer, Times
from benchmarks.runtime.systems import World, module_stages
from megatron_pp_ext.features.offload.copies import share_offloaded, with_whole_share
from megatron_pp_ext.features.offload.runtime.host_buffers import HostBuffers
from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from tests.support.copy_engines import Threads
from tests.support.ranks import run_ranks

TIMES = Times(0.050, 0.050, 0.050, 8 << 10)
SAVED = 4 << 20
"""The bytes that each stage keeps of a microbatch."""

FAMILIES = ("1f1b", "interleaved", "zb-h1", "v-min", "v-half", "v-zb")
CASES = [(name, *copies) for name in FAMILIES for copies in ((0.0, 0.5), (0.5, 0.5), (1.0, 1.0))]
"""The family, the share that is to leave, and the part of an F that a copy of its activations takes."""


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(SAVED, dtype=torch.uint8))
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        assert ctx.saved_tensors[0].nbytes == SAVED
        return gradients[0]


class SavingLayer(SleepingLayer):
    """Sleeps, and keeps ``SAVED`` bytes."""

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """See ``SleepingLayer``."""
        result: torch.Tensor = _Save.apply(super().forward(activation))
        return result


def planned(family: str, ranks: int, share: float, part: float) -> Timeline:
    """Return ``family`` with copies, each of which takes ``part`` of an F."""
    schedule = catalog.build(family, ranks, 4 * ranks)
    costs = TIMES.costs(schedule.placement)
    stages = tuple(
        replace(stage, copy=part * stage.forward, released_by_input_gradient=stage.activation)
        for stage in costs.stages
    )
    costs = replace(costs, stages=stages)
    return with_whole_share(schedule, costs, share) if share else simulate(schedule, costs)


def measure(rank: int, timelines: list[Timeline], repeats: int) -> list[tuple[list[float], int]]:
    """Return the seconds of every step of each timeline, and the bytes that this rank had at most."""
    pin_to_core(rank)
    world = World.join(timelines[0].schedule.ranks)
    gc.collect()
    gc.freeze()
    results = []
    for timeline in timelines:
        schedule = timeline.schedule
        stages = module_stages(schedule, TIMES, SavingLayer)
        engines = Threads(timeline.costs.stages[0].copy / SAVED)
        away = OffloadedActivations(HostBuffers(float("inf")), engines, SAVED)
        plan, seconds, recorder = plan_rank(schedule, rank), [], StepRecorder()
        for number in range(repeats + 1):
            dist.barrier()
            start = time.perf_counter()
            if number:
                execute(plan, Rank(stages, world.channels(TIMES), parts=[away]))
                seconds.append(time.perf_counter() - start)
            else:
                with recorder.step():
                    execute(plan, Rank(stages, world.channels(TIMES), recorder, parts=[away]))
        results.append((seconds, recorder.record.peak_bytes))
    return results


def rows_of(ranks: int, repeats: int) -> list[Row]:
    """Return a row for each of ``CASES``."""
    timelines = [planned(name, ranks, share, part) for name, share, part in CASES]
    results = run_ranks(measure, ranks, timelines, repeats, timeout=3600)
    rows: list[Row] = []
    for at, ((name, _, part), timeline) in enumerate(zip(CASES, timelines, strict=True)):
        steps = [max(of_ranks) for of_ranks in zip(*(of_rank[at][0] for of_rank in results), strict=True)]
        chunks = timeline.schedule.placement.chunks
        peaks = [of_rank[at][1] // SAVED / chunks for of_rank in results]
        rows.append(
            (
                name,
                f"{share_offloaded(timeline):.0%}",
                f"{part:.2f}",
                f"{1e3 * timeline.makespan:.0f}",
                f"{1e3 * median(steps):.0f}",
                f"{median(steps) / timeline.makespan:.3f}",
                f"{max(timeline.peak_microbatches):.1f}",
                f"{max(peaks):.1f}",
            )
        )
    return rows


def main(
    out: Out = RESULTS / "offload_runtime.md",
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 4,
    repeats: Annotated[int, typer.Option(help="Steps that count.")] = 3,
) -> None:
    """Measure all cases and write a table."""
    head = ("schedule", "away", "copy/F", "planned ms", "median ms", "median/planned", "planned peak", "peak")
    with cores_awake():
        rows = rows_of(ranks, repeats)
    about = (
        f"F = I = W = {1e3 * TIMES.forward:.0f} ms for the stages of a rank together, p = {ranks}, m = 4p; "
        f"the median of {repeats} steps. Peaks are the most microbatches whose activations are on a rank's "
        "device. A backward's first half gives back all of them here."
    )
    publish(out, "Steps with activations on the host against their plans", about, table(head, rows))


if __name__ == "__main__":
    typer.run(main)
