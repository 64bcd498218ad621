"""The factors of the systems, fitted on all published steps but those of one publisher at a time.

python -m benchmarks.planner.found_factors RUNS   # two minutes of a core

RUNS is the folder of ``found_runs``.  Runs of ``reference.training_runs`` take part.  What is minimized is
the mean error over kinds; in a kind a publisher counts by the root of its number of runs, since its runs are
alike, and no error by more than ``_MOST``, since some recipes are not those that ran.  What shipped systems
have is the best of all publishers.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from benchmarks.planner.found_runs import FoundRun, compared, found, publisher_of
from benchmarks.planner.held_out import with_factors
from benchmarks.planner.judged import judged
from megatron_pp_ext.costs import system
from reference.training_runs import runs

FILE = Path(__file__).with_suffix(".json")
_MOST, _EVERY = 0.35, 24

FAMILIES: Mapping[str, Sequence[str]] = {
    "hopper": ("h100", "h200"),
    "blackwell": ("b200", "b300", "gb200", "gb300"),
}
"""Groups of devices with the same factors.  With those of boards (B200, B300) apart from those of racks
(GB200, GB300), steps that were held out were estimated worse when that was tried: FP8 on B200 by 9.1% in
place of 7.0%."""
_STARTS = (2e-5, 2.6e-5)
TRIED: Mapping[str, Mapping[str, Sequence[float]]] = {
    "hopper": {
        "clock": (0.925, 0.94, 0.955, 0.97),
        "copy": (0.4,),
        "kernel_seconds": _STARTS,
        "scale": (1.0, 0.9925),
    },
    "blackwell": {
        "clock": (0.9, 0.92, 0.94, 0.96),
        "copy": (0.34,),
        "kernel_seconds": _STARTS,
    },
}
"""The values of each factor that are tried for the systems of a family.

Copies on Hopper have the value that was fitted without "scale", whose fit cannot tell 0.36 from 0.4.
Copies on Blackwell are not fitted: the same kernels of norms reach 0.83 to 0.85 of the share of the peak on
GB200 and GB300 that they do on an H200, on average over cuDNN's, torch's and those of torch.compile
(NVIDIA/cudnn-frontend, commit 3929da2e, benchmark/norms/results).  Casts are not fitted either: they have
rates of their own (``System.sustained``), and "scale" on Blackwell is Hopper's, which has more sweeps over
GPUs (``sweeps``)."""

type Factors = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Ratio:
    """The estimated seconds of a run of ``publisher`` for each second measured."""

    publisher: str
    kind: str
    ratio: float


type Points = Mapping[tuple[float, ...], Sequence[Ratio]]
"""The ratios of the runs of a family for each choice of its factors."""


def fitted(folder: Path) -> Mapping[str, Mapping[str, Factors]]:
    """Return the factors of each family without each publisher, and with all of them, by "".

    A host starts a kernel in the same time whatever the device, so that is the one that suits all families.
    """
    tried = {family: _points(folder, family) for family in FAMILIES}
    every = (ratio for points in tried.values() for ratio in next(iter(points.values())))
    content: dict[str, dict[str, Factors]] = {family: {} for family in FAMILIES}
    for left_out in ("", *sorted({ratio.publisher for ratio in every})):
        best = {
            seconds: {family: _best(family, points, left_out, seconds) for family, points in tried.items()}
            for seconds in _STARTS
        }
        chosen = min(best.values(), key=lambda families: sum(error for error, _ in families.values()))
        for family, (_, factors_of_family) in chosen.items():
            content[family][left_out] = factors_of_family
    return content


def _points(folder: Path, family: str) -> Points:
    runs_of_family = [run for run in found(folder) if run.gpu in FAMILIES[family] and not run.is_doubtful]
    names = list(TRIED[family])
    return {
        point: _ratios(runs_of_family, family, dict(zip(names, point, strict=True)))
        for point in product(*TRIED[family].values())
    }


def _best(family: str, points: Points, left_out: str, start: float) -> tuple[float, Factors]:
    """Return the least error with kernels that start in ``start`` seconds, and the factors that have it."""
    names = list(TRIED[family])
    at = names.index("kernel_seconds")
    errors = {point: _error(ratios, left_out) for point, ratios in points.items() if point[at] == start}
    point = min(errors, key=errors.__getitem__)
    return errors[point], dict(zip(names, point, strict=True))


def _ratios(found_runs: Sequence[FoundRun], family: str, factors: Factors) -> list[Ratio]:
    ratios = []
    for run in found_runs:
        comparison = compared(run, with_factors(system.read(run.gpu), factors))
        if comparison.estimated is not None:
            ratios.append(Ratio(run.publisher, _kind(run.kind), comparison.ratio))
    for number, job in enumerate(job for job in runs() if job.seconds and job.gpu in FAMILIES[family]):
        if job.source != "vtrain-single" or not number % _EVERY:
            other = judged(job, with_factors(system.read(job.gpu), factors))
            ratios.append(Ratio(publisher_of(job.source), _kind(other.kind), other.ratio))
    return ratios


def _kind(name: str) -> str:
    """Return the kind whose error counts, of those that ``name`` has the word of."""
    return next(word for word in ("experts", "small", "FP8", "dense") if word in name)


def _error(ratios: Sequence[Ratio], left_out: str) -> float:
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for ratio in ratios:
        if ratio.publisher != left_out:
            errors[ratio.kind][ratio.publisher].append(min(abs(ratio.ratio - 1), _MOST))
    return mean(_weighted(by_publisher.values()) for by_publisher in errors.values())


def _weighted(errors: Sequence[Sequence[float]]) -> float:
    weights = [len(group) ** 0.5 for group in errors]
    return sum(mean(group) * weight for group, weight in zip(errors, weights, strict=True)) / sum(weights)


@cache
def factors() -> Mapping[str, Mapping[str, Factors]]:
    """Return the factors that were fitted, by family and by the publisher that is left out."""
    content: Mapping[str, Mapping[str, Factors]] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def held_out(run: FoundRun) -> Factors:
    """Return the factors that were fitted without the publisher of ``run``; none for other devices."""
    for family, names in FAMILIES.items():
        if run.gpu in names:
            by_publisher = factors()[family]
            return by_publisher.get(run.publisher, by_publisher[""])
    return {}


def main(folder: Annotated[Path, typer.Argument(help="The folder of found_runs.")]) -> None:
    """Fit the factors of all families and write them."""
    FILE.write_text(json.dumps(fitted(folder), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
