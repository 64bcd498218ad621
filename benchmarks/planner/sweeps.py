"""Do steps grow with the number of GPUs more than estimates do?

python -m benchmarks.planner.sweeps RUNS

RUNS is the folder of ``found_runs``.  A sweep is the steps of one job on several numbers of GPUs, where only
the global batch differs.  Its growth is the slope of measured over estimated seconds by the logarithm of
GPUs, each with the factors of the shipped system, but for "scale", which is left out in one of the columns.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import linear_regression, median
from typing import Annotated

import typer

from benchmarks.planner.found_runs import compared, found
from benchmarks.planner.judged import judged
from benchmarks.report import Row, table
from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.system import System
from reference.training_runs import runs

_BATCH = ("global_batch_size", "--global-batch-size")
_NODE = 8


@dataclass(frozen=True, slots=True)
class Point:
    """The ``gpus`` of a run, and its measured over its estimated seconds without and with "scale"."""

    gpus: int
    without: float
    with_scale: float


def _machines(name: str) -> tuple[System, System]:
    machine = system.read(name)
    shares = {share: value for share, value in machine.sustained.items() if share != "scale"}
    return replace(machine, sustained=shares), machine


def _points(folder: Path) -> Iterator[tuple[tuple[str, str], Point]]:
    """Yield the name of each run's job, with all that it must have in common with others, and the run."""
    for job in runs():
        if job.seconds and "scale" in system.read(job.gpu).sustained:
            sizes = {name: value for name, value in job.model.items() if name not in _BATCH}
            ratios = (1 / judged(job, machine).ratio for machine in _machines(job.gpu))
            name = f"{job.source}, {'FP8' if any('fp8' in size for size in sizes) else 'bf16'} on {job.gpu}"
            yield (name, str(sizes)), Point(job.gpus, *ratios)
    for run in found(folder):
        if "scale" not in system.read(run.gpu).sustained:
            continue
        comparisons = [compared(run, machine) for machine in _machines(run.gpu)]
        if all(comparison.estimated is not None for comparison in comparisons):
            words = list(run.flags)
            if _BATCH[1] in words:
                del words[(at := words.index(_BATCH[1])) : at + 2]
            name = f"{run.publisher}, {run.precision} on {run.gpu}"
            yield (
                (name, f"{run.model} {words}"),
                Point(run.gpus, *(1 / comparison.ratio for comparison in comparisons)),
            )


def sweeps(folder: Path) -> Mapping[tuple[str, str], Sequence[Point]]:
    """Return the runs of each job that was measured on more than one number of GPUs, at least a node."""
    by_job = defaultdict(list)
    for name, point in _points(folder):
        if point.gpus >= _NODE:
            by_job[name].append(point)
    return {name: points for name, points in by_job.items() if len({point.gpus for point in points}) > 1}


def _growth(gpus: Sequence[int], ratios: Sequence[float]) -> float:
    return linear_regression([math.log2(count) for count in gpus], ratios).slope


def main(folder: Annotated[Path, typer.Argument(help="The folder of found_runs.")]) -> None:
    """Print how much each sweep grows with a doubling of GPUs, beyond its estimates."""
    rows: list[Row] = []
    growths = []
    for (name, _), points in sorted(sweeps(folder).items()):
        gpus = [point.gpus for point in points]
        columns = [point.without for point in points], [point.with_scale for point in points]
        growth = [_growth(gpus, ratios) for ratios in columns]
        growths.append(growth)
        rows.append(
            (name, len(points), f"{min(gpus)} to {max(gpus)}", *(f"{value:+.1%}" for value in growth))
        )
    middle = (f"{median(column):+.1%}" for column in zip(*growths, strict=True))
    rows.append(("median", "", "", *middle))
    print(table(("job", "runs", "GPUs", "growth for a doubling", "beyond estimates with scale"), rows))


if __name__ == "__main__":
    typer.run(main)
