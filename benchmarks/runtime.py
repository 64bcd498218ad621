"""How much longer than its schedule does a step take?  (two CPU cores, gloo, stages that sleep)

    python benchmarks/runtime.py [--ranks 2,4,8] [--settings ...] [--repeats 3]

Our executor under every family beside stock Megatron's and torch.distributed.pipelining's schedulers, on
the same stages in the same processes, one after the other within each repeat, and beside the same actions
without any scheduler: what the machine and gloo's messages add.  Writes results/runtime.md.
"""

import gc
import os
import platform
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import torch.distributed as dist
import torch.multiprocessing
import typer
from bare import (
    Wires,
    core_seconds,
    cores_awake,
    keep_freed_memory,
    sleep_precisely,
    stay_on_a_core,
    wire_up,
)
from rich.progress import track
from sleeping import Times, calibrated
from systems import SYSTEMS, System, World, sockets
from tables import publish, table

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.simulate import simulate

RESULTS = Path(__file__).parent / "results" / "runtime.md"
SETTINGS = {
    "F 50 ms, 8 KiB": (Times(0.050, 0.050, 0.050, 8 << 10), 1.02),
    "F 10 ms, 8 KiB": (Times(0.010, 0.010, 0.010, 8 << 10), 1.05),
    "F 2 ms, 8 KiB": (Times(0.002, 0.002, 0.002, 8 << 10), 1.15),
    "F 10 ms, 4 MiB": (Times(0.010, 0.010, 0.010, 4 << 20), 1.10),
}
"""Times of a whole stage, and the goal: measured over predicted."""

Ranks = Annotated[str, typer.Option(help="Numbers of ranks.")]
Settings = Annotated[str, typer.Option(help="Which of them, by name.")]
Repeats = Annotated[int, typer.Option(help="Steps that count, of each system.")]
Write = Annotated[bool, typer.Option(help="Write the results, or print them.")]
ALL_SETTINGS = ",".join(name.replace(", ", "/") for name in SETTINGS)

_FITS = 64 << 10
"""Bytes of a message that any socket takes at once."""


def predicted(family: str, ranks: int, microbatches: int, times: Times, hop: float = 0.0) -> float:
    """Seconds of a step by the simulator, with ``hop`` seconds for a message."""
    schedule = catalog.build(family, ranks, microbatches)
    chunks = schedule.placement.chunks
    stage = StageCosts(
        times.forward / chunks, times.input_gradient / chunks, times.weight_gradient / chunks, 1 / chunks
    )
    return simulate(schedule, Costs((stage,) * schedule.placement.stages, hop)).makespan


def systems_for(times: Times) -> list[System]:
    """All, but for plain sockets where their buffers would not hold a message."""
    return [system for system in SYSTEMS if system.build is not sockets or times.message_bytes <= _FITS]


def chosen(ranks: str, settings: str) -> list[tuple[int, str]]:
    """The numbers of ranks and the names of settings that the options of those names ask for."""
    names = [name.replace("/", ", ") for name in settings.split(",")]
    return [(count, name) for name in names for count in map(int, ranks.split(","))]


class Taken(NamedTuple):
    """Seconds of a step of ``system``: by the simulator, and in each repeat."""

    system: System
    expected: float
    steps: list[float]

    @property
    def ratio(self) -> float:
        """The median over what was expected."""
        return median(self.steps) / self.expected


def measure(
    rank: int,
    systems: Sequence[System],
    ranks: int,
    microbatches: int,
    times: Times,
    repeats: int,
    file: str,
    wires: Wires,
) -> None:
    """On one rank: run every system once to warm up and ``repeats`` times more; rank 0 writes seconds."""
    torch.set_num_threads(1)
    sleep_precisely()
    keep_freed_memory()
    stay_on_a_core(rank)
    world = World.join(rank, ranks, file, wires)
    told = [{chunks: calibrated(times, chunks) for chunks in (1, 2)} if rank == 0 else {}]
    dist.broadcast_object_list(told)
    gc.collect()
    gc.freeze()  # what is imported need not be looked through within a step
    # Otherwise the progress of eight ranks would be mixed with what they log.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    runs = []
    for system in systems:
        schedule = catalog.build(system.family, ranks, microbatches)
        slept = times if system.is_bare else told[0][schedule.placement.chunks]
        runs.append(system.build(world, schedule, slept))
    spans: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        for run in runs:
            dist.barrier()
            start = time.perf_counter()
            run()
            spans.append((start, time.perf_counter()))
    everyone: list[list[tuple[float, float]]] = [[]] * ranks
    dist.all_gather_object(everyone, spans)
    if rank == 0:
        # All ranks read the machine's one monotonic clock.
        steps = [
            max(end for _, end in step) - min(start for start, _ in step)
            for step in zip(*everyone, strict=True)
        ]
        Path(f"{file}.steps").write_text(" ".join(map(str, steps[len(systems) :])))
    dist.barrier()
    os._exit(0)  # torch's and Megatron's groups would take a second each to tear down


def steps_of(systems: Sequence[System], ranks: int, setting: str, repeats: int, folder: Path) -> list[Taken]:
    """Run ``systems`` in processes of their own; ``folder`` is for what these leave."""
    times, _ = SETTINGS[setting]
    microbatches = 4 * ranks
    file = folder / f"{ranks}-{list(SETTINGS).index(setting)}"
    torch.multiprocessing.start_processes(
        measure,
        (systems, ranks, microbatches, times, repeats, str(file), wire_up(ranks)),
        nprocs=ranks,
        start_method="fork",
    )
    steps = [float(word) for word in Path(f"{file}.steps").read_text().split()]
    return [
        Taken(system, predicted(system.family, ranks, microbatches, times), steps[number :: len(systems)])
        for number, system in enumerate(systems)
    ]


def row(taken: Taken, goal: float) -> tuple[object, ...]:
    """Predicted and measured milliseconds, and the ratios."""
    system, expected, steps = taken
    met = "" if not system.name.startswith("ours") else "met" if taken.ratio <= goal else f"goal {goal}"
    return (
        system.name,
        *(f"{1e3 * seconds:.1f}" for seconds in (expected, median(steps), min(steps))),
        f"{taken.ratio:.3f}",
        f"{min(steps) / expected:.3f}",
        met,
    )


def hops(ranks: int, times: Times) -> str:
    """What large messages alone add to a step on this machine."""
    if times.message_bytes <= _FITS:
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
    ranks: Ranks = "2,4,8",
    settings: Settings = ALL_SETTINGS,
    repeats: Repeats = 3,
    write: Write = True,
) -> None:
    """Measure and write the table."""
    import tempfile

    head = ("system", "predicted ms", "median ms", "least ms", "median/predicted", "least/predicted", "goal")
    text = [
        "# Measured against predicted step time",
        "",
        f"`python benchmarks/runtime.py --ranks {ranks} --repeats {repeats}` on {platform.machine()}, "
        f"{os.cpu_count()} cores, {date.today()}. F = I = W, {repeats} steps of each system, alternating; "
        "m = 4p. F, I and W include what autograd takes for a sleeping layer, as measured on one alone. "
        "Ranks are bound to cores, which idle-priority processes keep from halting, and keep the memory that "
        "they free. Alone: the same actions with nothing but sleep and messages, over sockets without torch; "
        "over torch's process groups (gloo), without a scheduler; and by our executor, with neither module "
        "nor autograd.",
    ]
    with tempfile.TemporaryDirectory() as folder, cores_awake():
        for count, name in track(chosen(ranks, settings), "measuring"):
            times, goal = SETTINGS[name]
            taken = steps_of(systems_for(times), count, name, repeats, Path(folder))
            rows = [row(one, goal) for one in taken]
            text += ["", f"## {name}, p = {count}", "", hops(count, times) + table(head, rows)]
    publish(text, RESULTS if write else None)


if __name__ == "__main__":
    typer.run(main)
