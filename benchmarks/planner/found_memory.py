"""How far are estimates of memory from what was measured, and is any job that ran called too large?

python -m benchmarks.planner.found_memory RUNS            # a minute
python -m benchmarks.planner.found_memory RUNS --each     # every peak, in parts

RUNS is the folder of ``found_runs``, with ``functional_tests.json`` (``found_peaks``) beside it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from benchmarks.planner import training_runs
from benchmarks.planner.found_peaks import Peak, functional_tests
from benchmarks.planner.found_runs import FoundRun, asked, found, machine_of
from benchmarks.report import Row, table
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.step.error_band import headroom
from megatron_pp_ext.planner.step.estimate import RankMemory, estimate_request

LARGE = 10e9
"""The fewest bytes of a peak that is judged by itself: smaller ones are mostly workspaces."""


@dataclass(frozen=True, slots=True)
class Room:
    """The fullest rank of a ``run`` that was run, and the ``memory`` of its GPU in bytes."""

    run: FoundRun
    fullest: RankMemory
    memory: float
    headroom: float

    @property
    def used(self) -> float:
        """The part of the GPU's memory that the rank is estimated to take."""
        return self.fullest.total / self.memory


def rooms(folder: Path) -> Iterator[Room]:
    """Yield the memory that each run of ``folder`` leaves free on a GPU, where it can be estimated."""
    for run in found(folder):
        if run.why_outside:
            continue
        try:
            machine, job = machine_of(run), asked(run)
            estimate = estimate_request(job, machine, for_world(job, run.gpus))
        except ValueError:
            continue
        yield Room(run, estimate.fullest, machine.memory_bytes, headroom(job))


def peaks(every: Sequence[Peak], each: bool) -> str:
    """Return the errors of peaks by size and kind, and the large ones, or ``each`` one, in parts."""
    estimated = sorted((peak for peak in every if peak.estimated), key=lambda peak: peak.error)
    groups = {
        f"{kind}, {size}": [
            peak
            for peak in estimated
            if peak.has_experts is (kind == "experts")
            and (peak.measured >= LARGE) is (size == "from 10 GB on")
        ]
        for size in ("from 10 GB on", "smaller")
        for kind in ("dense", "experts")
    }
    parts = [name for name, _ in _memory(estimated[0]).components() if name not in ("versions", "reserved")]
    selected = [peak for peak in estimated if each or peak.measured >= LARGE]
    head = ("kind", "peaks", "mean absolute error", "mean", "lowest", "highest")
    columns = ("last rank of", "GPUs", "measured GB", "error", *parts)
    return "\n\n".join(
        (
            table(head, (_summary(name, group) for name, group in groups.items() if group)),
            table(columns, (_row(peak, parts) for peak in selected)),
            table(
                ("not compared, since", "peaks"),
                Counter(peak.why for peak in every if not peak.estimated).most_common(),
            ),
        )
    )


def _summary(name: str, peaks: Sequence[Peak]) -> Row:
    errors = [peak.error for peak in peaks]
    figures = (mean(map(abs, errors)), mean(errors), min(errors), max(errors))
    return name, len(peaks), f"{figures[0]:.1%}", *(f"{figure:+.1%}" for figure in figures[1:])


def _memory(peak: Peak) -> RankMemory:
    assert peak.estimated is not None
    return peak.estimated


def _row(peak: Peak, parts: Iterable[str]) -> Row:
    figures = (f"{getattr(peak.estimated, part) / 1e9:.2f}" for part in parts)
    return peak.name, peak.gpus, f"{peak.measured / 1e9:.2f}", f"{peak.error:+.1%}", *figures


def printed(folder: Path, every: Iterable[Room]) -> str:
    """Return the estimates of the runs of ``others.json`` that print memory, without what is reserved."""
    rows = json.loads((folder / "others.json").read_text(encoding="utf-8"))
    sizes = {(row["name"], row["gpus"]): row["memory_gb"] for row in rows if row["memory_gb"]}
    sizes_of_runs = [
        (room.run.name, size, (room.fullest.total - room.fullest.reserved) / 1e9)
        for room in every
        if (size := sizes.get((room.run.name, room.run.gpus)))
    ]
    rows_shown = (
        (name, size, f"{bytes_:.1f}", f"{bytes_ / size - 1:+.1%}") for name, size, bytes_ in sizes_of_runs
    )
    return table(("run", "printed GB", "estimated GB", "error"), rows_shown)


def fits(every: Sequence[Room]) -> str:
    """Return how many runs that were run fit, and which do so only without the headroom of a search."""
    too_large = [room for room in every if room.used > 1]
    tight = [room for room in every if 1 - room.headroom < room.used <= 1]
    words = (
        f"{len(every) - len(too_large)} of {len(every)} published runs fit; {len(tight)} of them take more "
        "than a search would:"
    )
    head = ("run", "GPUs", "GB", "of the memory", "a search takes")
    return f"{words}\n\n{table(head, map(_room, [*too_large, *tight]))}"


def _room(room: Room) -> Row:
    run = room.run
    name = f"{run.name}, {run.precision}"
    used, most = f"{room.used:.1%}", f"{1 - room.headroom:.0%}"
    return name, f"{run.gpus} {run.gpu}", f"{room.fullest.total / 1e9:.1f}", used, most


def main(
    folder: Annotated[Path, typer.Argument(help="The folder of found_runs.")],
    each: Annotated[bool, typer.Option("--each", help="Print small peaks too.")] = False,
) -> None:
    """Print peaks beside their estimates, and whether published runs fit."""
    print(f"Peaks of Megatron-LM's functional tests\n\n{peaks(list(functional_tests(folder)), each)}\n")
    print(f"Published runs of reference/training_runs.json\n\n{training_runs.memory()}\n")
    every = list(rooms(folder))
    print(f"Published steps in RUNS\n\n{fits(every)}\n\n{printed(folder, every)}")


if __name__ == "__main__":
    typer.run(main)
