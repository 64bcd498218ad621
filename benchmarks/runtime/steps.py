"""How much longer than its schedule does a step take?  (two CPU cores, gloo, stages that sleep)

    python -m benchmarks.runtime.steps [--ranks 2,4,8] [--settings ...] [--repeats 3]

Every family runs on our executor, beside the schedulers of stock Megatron and torch.distributed, on
the same stages in the same processes, in turns; and beside the same actions without any scheduler, which
shows what the machine and gloo's messages add.  Writes results/runtime.md.
"""

import gc
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.progress import track

from benchmarks.measuring import in_turns
from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.runtime.machine import core_seconds, cores_awake, pin_to_core, step_seconds
from benchmarks.runtime.stages import Times, calibrated
from benchmarks.runtime.systems import SYSTEMS, RunStep, System, World
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.ranks import run_ranks

SETTINGS = {
    "F 50 ms, 8 KiB": (Times(0.050, 0.050, 0.050, 8 << 10), 1.02),
    "F 10 ms, 8 KiB": (Times(0.010, 0.010, 0.010, 8 << 10), 1.05),
    "F 2 ms, 8 KiB": (Times(0.002, 0.002, 0.002, 8 << 10), 1.15),
    "F 10 ms, 4 MiB": (Times(0.010, 0.010, 0.010, 4 << 20), 1.10),
}
"""Times of a whole stage, and the goal for measured over predicted."""
ALL_SETTINGS = ",".join(name.replace(", ", "/") for name in SETTINGS)

SOCKET_BUFFER = 64 << 10
"""The largest message in bytes that a socket takes at once."""


def predicted(family: str, ranks: int, microbatches: int, times: Times, hop: float = 0.0) -> float:
    """Return the seconds of a simulated step, with ``hop`` seconds for a message."""
    schedule = catalog.build(family, ranks, microbatches)
    return simulate(schedule, times.costs(schedule.placement, hop)).makespan


def measure(
    rank: int, systems: Sequence[System], ranks: int, microbatches: int, times: Times, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Run all systems in turns on one rank, and return start and end of every step of each."""
    pin_to_core(rank)
    world = World.join(ranks)
    shorter = [{chunks: calibrated(times, chunks) for chunks in (1, 2)} if rank == 0 else {}]
    dist.broadcast_object_list(shorter)
    gc.collect()
    gc.freeze()  # the collector need not look through imported modules within a step

    def timed(run: RunStep) -> tuple[float, float]:
        dist.barrier()
        start = time.perf_counter()
        run()
        return start, time.perf_counter()

    ways = {}
    for system in systems:
        schedule = catalog.build(system.family, ranks, microbatches)
        slept = shorter[0][schedule.placement.chunks] if system.has_autograd else times
        ways[system.name] = partial(timed, system.build(world, schedule, slept))
    in_turns(ways, 1)
    # The systems have scattered what they keep over the heap: new pages are touched here, not within a step.
    torch.ones(2 * microbatches * times.message_bytes, dtype=torch.uint8)
    return in_turns(ways, repeats)


def rows_of(systems: Sequence[System], ranks: int, setting: str, repeats: int) -> list[Row]:
    """Return a row for each system: predicted and measured milliseconds, their ratios and the goal."""
    times, goal = SETTINGS[setting]
    microbatches = 4 * ranks
    results = run_ranks(measure, ranks, systems, ranks, microbatches, times, repeats, timeout=3600)
    rows: list[Row] = []
    for system in systems:
        expected = predicted(system.family, ranks, microbatches, times)
        steps = step_seconds([spans[system.name] for spans in results])
        ratio = median(steps) / expected
        met = "met" if ratio <= goal else f"goal {goal}"
        milliseconds = (f"{1e3 * seconds:.1f}" for seconds in (expected, median(steps), min(steps)))
        ratios = (f"{ratio:.3f}", f"{min(steps) / expected:.3f}")
        rows.append((system.name, *milliseconds, *ratios, met if system.name.startswith("ours") else ""))
    return rows


def hops(ranks: int, times: Times) -> str:
    """Return a paragraph on what large messages alone add to a step on this machine."""
    if times.message_bytes <= SOCKET_BUFFER:
        return ""
    hop, longer = core_seconds(times.message_bytes), []
    for name in ("1f1b", "interleaved", "v-min", "v-zb"):
        ratio = predicted(name, ranks, 4 * ranks, times, hop) / predicted(name, ranks, 4 * ranks, times)
        longer.append(f"{ratio:.3f} ({name})")
    return (
        f"Passing one message over a socket takes {1e3 * hop:.1f} ms of a core. Hops of that length, with "
        f"cores free for them, make the simulated steps longer by a factor of {', '.join(longer)}.\n\n"
    )


def main(
    out: Out = RESULTS / "runtime.md",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4,8",
    settings: Annotated[str, typer.Option(help="Settings, by name.")] = ALL_SETTINGS,
    repeats: Annotated[int, typer.Option(help="Steps of each system that count.")] = 3,
) -> None:
    """Measure all systems and write a table for each setting and number of ranks."""
    head = ("system", "predicted ms", "median ms", "least ms", "median/predicted", "least/predicted", "goal")
    names = [name.replace("/", ", ") for name in settings.split(",")]
    parts = []
    with cores_awake():
        for name, count in track([(n, c) for n in names for c in map(int, ranks.split(","))], "measuring"):
            text = hops(count, SETTINGS[name][0]) + table(head, rows_of(SYSTEMS, count, name, repeats))
            parts += [f"## {name}, p = {count}", text]
    about = (
        f"F = I = W, {repeats} steps of each system, in turns; m = 4p. F, I and W include what autograd "
        "takes for a sleeping layer, as measured on one alone. Ranks are bound to cores, which idle-priority "
        "processes keep from halting, and keep the memory that they free. Alone: the same actions with "
        "nothing but sleep and messages, over torch's process groups (gloo) without a scheduler, and by our "
        "executor with neither module nor autograd."
    )
    publish(out, "Measured against predicted step time", about, *parts)


if __name__ == "__main__":
    typer.run(main)
