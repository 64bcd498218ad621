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
from megatron_pp_ext.planner.step.estimate import RankMemory, estimate_request
from megatron_pp_ext.planner.step.peaks import headroom

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
    """Yield what each run of ``folder`` that can be estimated leaves of a GPU's memory."""
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
    known = sorted((one for one in every if one.estimated), key=lambda one: one.error)
    groups = {
        f"{kind}, {size}": [
            one
            for one in known
            if one.has_experts is (kind == "experts") and (one.measured >= LARGE) is (size == "from 10 GB on")
        ]
        for size in ("from 10 GB on", "smaller")
        for kind in ("dense", "experts")
    }
    parts = [name for name, _ in _memory(known[0]).components() if name not in ("versions", "reserved")]
    shown = [one for one in known if each or one.measured >= LARGE]
    head = ("kind", "peaks", "mean absolute error", "mean", "lowest", "highest")
    columns = ("last rank of", "GPUs", "measured GB", "error", *parts)
    return "\n\n".join(
        (
            table(head, (_summary(name, ones) for name, ones in groups.items() if ones)),
            table(columns, (_row(one, parts) for one in shown)),
            table(
                ("not compared, since", "peaks"),
                Counter(one.why for one in every if not one.estimated).most_common(),
            ),
        )
    )


def _summary(name: str, ones: Sequence[Peak]) -> Row:
    errors = [one.error for one in ones]
    figures = (mean(map(abs, errors)), mean(errors), min(errors), max(errors))
    return name, len(ones), f"{figures[0]:.1%}", *(f"{figure:+.1%}" for figure in figures[1:])


def _memory(one: Peak) -> RankMemory:
    assert one.estimated is not None
    return one.estimated


def _row(one: Peak, parts: Iterable[str]) -> Row:
    figures = (f"{getattr(one.estimated, part) / 1e9:.2f}" for part in parts)
    return one.name, one.gpus, f"{one.measured / 1e9:.2f}", f"{one.error:+.1%}", *figures


def printed(folder: Path, every: Iterable[Room]) -> str:
    """Return the estimates of the runs of ``others.json`` that print memory, without what is reserved."""
    rows = json.loads((folder / "others.json").read_text(encoding="utf-8"))
    sizes = {(row["name"], row["gpus"]): row["memory_gb"] for row in rows if row["memory_gb"]}
    found = [
        (one.run.name, size, (one.fullest.total - one.fullest.reserved) / 1e9)
        for one in every
        if (size := sizes.get((one.run.name, one.run.gpus)))
    ]
    shown = ((name, size, f"{bytes_:.1f}", f"{bytes_ / size - 1:+.1%}") for name, size, bytes_ in found)
    return table(("run", "printed GB", "estimated GB", "error"), shown)


def fits(every: Sequence[Room]) -> str:
    """Return how many runs that were run fit, and which do so only without the headroom of a search."""
    too_large = [one for one in every if one.used > 1]
    tight = [one for one in every if 1 - one.headroom < one.used <= 1]
    words = (
        f"{len(every) - len(too_large)} of {len(every)} published runs fit; {len(tight)} of them take more "
        "than a search would:"
    )
    head = ("run", "GPUs", "GB", "of the memory", "a search takes")
    return f"{words}\n\n{table(head, map(_room, [*too_large, *tight]))}"


def _room(one: Room) -> Row:
    run = one.run
    name = f"{run.name}, {run.precision}"
    taken, most = f"{one.used:.1%}", f"{1 - one.headroom:.0%}"
    return name, f"{run.gpus} {run.gpu}", f"{one.fullest.total / 1e9:.1f}", taken, most


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
