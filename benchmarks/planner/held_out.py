"""The factors of a device, fitted on published steps, and the errors on the steps of a publisher left out.

What one kernel or collective takes alone is measured (``components``).  In a step the clock is lower, kernels
that device memory bounds follow each other with gaps, and a host starts kernels more slowly than a graph
does.  These few factors are fitted by the mean error over sources, since jobs of one source are alike.  On
the A100, what is left out together is all that one publisher measured in a year: its sources share machines
and software.  The factors of later devices (``found_factors``) were fitted without one publisher at a time.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import mean

from benchmarks.planner.found_runs import publisher_of
from benchmarks.planner.judged import Judged, judged
from benchmarks.report import Row, table
from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.system import System
from reference.training_runs import PublishedRun, runs

FILE = Path(__file__).with_suffix(".json")
LATER = FILE.with_name("found_factors.json")
"""The factors that ``found_factors`` fitted for devices after the A100."""

_SMALL, _EVERY = "vtrain-single", 12
"""The source of all small models: its halves, by a hash of the job, are left out one at a time, since no
other source shows how fast hosts start kernels.  One in so many of its jobs takes part in fitting."""

TRIED: Mapping[str, Mapping[str, Sequence[float]]] = {
    "a100-80g": {
        "clock": (0.81,),
        "copy": (0.55, 0.65, 0.75),
        "network": (0.4, 0.6, 0.8, 1.0),
        "kernel_seconds": (3.4e-5, 3.7e-5),
    },
}
"""The values of each factor that are tried.  Those of later devices are fitted by ``found_factors``, on these
runs and on others.

The A100's clock is a compromise: steps here ask for less, and the weight gradients of arXiv 2401.10241, table
9, for more."""

_WATTS: Mapping[str, float] = {"b200": 1000, "b300": 1100, "gb200": 1200, "gb300": 1400}
"""The power limits of the GPUs of one family (ai-dynamo/aiconfigurator, commit 095f58a51, systems)."""

type Factors = Mapping[str, float]


def with_factors(machine: System, factors: Factors) -> System:
    """Return ``machine`` with these ``factors`` in place of its own.

    The clock of Blackwell's GPUs is the GB200's, by the cube root of their power limits: power grows with the
    square of the voltage and with the clock, and the clock with the voltage.
    """
    launch = factors["kernel_seconds"]
    shares = {name: value for name, value in factors.items() if name != "kernel_seconds"}
    power = _WATTS.get(machine.name, _WATTS["gb200"]) / _WATTS["gb200"]
    shares["clock"] = round(shares["clock"] * power ** (1 / 3), 3)
    return replace(machine, sustained={**machine.sustained, **shares}, kernel_seconds=launch)


def device_of(run: PublishedRun) -> str:
    """Return the device whose factors ``run``'s device has."""
    return "h100" if run.gpu == "h200" else run.gpu


def part_of(run: PublishedRun) -> str:
    """Return the part of the runs that ``run`` counts in: its source, or half of it."""
    if run.source != _SMALL:
        return run.source
    return f"{run.source}, half {sha256(run.name.encode()).digest()[0] % 2 + 1}"


def left_out_with(run: PublishedRun) -> str:
    """Return the group left out with ``run``: all of its publisher in a year, or half of the small models."""
    return part_of(run) if run.source == _SMALL else run.publisher


def fitted(device: str) -> dict[str, Factors]:
    """Return the factors of ``device`` without each of ``left_out_with``, and with all runs, by ""."""
    runs_of_device = [run for run in runs() if run.gpu == device and run.seconds]
    small = [run for run in runs_of_device if run.source == _SMALL]
    used = [run for run in runs_of_device if run.source != _SMALL] + small[::_EVERY]
    machine = system.read(device)
    errors: dict[tuple[float, ...], dict[str, float]] = {}
    for point in product(*TRIED[device].values()):
        tried = with_factors(machine, dict(zip(TRIED[device], point, strict=True)))
        by_source = defaultdict(list)
        for run in used:
            by_source[part_of(run)].append(abs(judged(run, tried).ratio - 1))
        errors[point] = {source: mean(errors_of_source) for source, errors_of_source in by_source.items()}
    parts: dict[str, set[str]] = {"": set()}
    for run in used:
        name = left_out_with(run)
        parts[name] = {part_of(other) for other in used if name in (left_out_with(other), other.publisher)}
    return {
        name: dict(zip(TRIED[device], _best(errors, left_out), strict=True))
        for name, left_out in parts.items()
    }


def _best(errors: Mapping[tuple[float, ...], Mapping[str, float]], left_out: Set[str]) -> tuple[float, ...]:
    def error(point: tuple[float, ...]) -> float:
        return mean(error_of_part for part, error_of_part in errors[point].items() if part not in left_out)

    return min(errors, key=error)


def keep() -> None:
    """Fit all devices and write the factors."""
    FILE.write_text(
        json.dumps({device: fitted(device) for device in TRIED}, indent=1) + "\n", encoding="utf-8"
    )


@cache
def factors() -> Mapping[str, Mapping[str, Factors]]:
    """Return the factors that were fitted: for each device without each group, and with all, by "".

    A group of the A100 is given by ``left_out_with``; of later devices it is a publisher.
    """
    content: dict[str, Mapping[str, Factors]] = json.loads(FILE.read_text(encoding="utf-8"))
    later = json.loads(LATER.read_text(encoding="utf-8"))
    return {**content, "h100": later["hopper"], "b200": later["blackwell"]}


@cache
def held_out() -> tuple[Judged, ...]:
    """Return every run that has a time, judged with the factors that were fitted without its publisher."""
    return tuple(_held_out(runs()))


def _held_out(every: Iterable[PublishedRun]) -> Iterable[Judged]:
    for run in every:
        if run.seconds:
            groups = factors()[device_of(run)]
            factors_of_run = groups.get(left_out_with(run)) or groups.get(
                publisher_of(run.source), groups[""]
            )
            yield judged(run, with_factors(system.read(run.gpu), factors_of_run))


def folds() -> str:
    """The factors with each group of runs left out; the first of a device's rows is of all, and shipped."""
    rows: list[Row] = []
    names = ("clock", "copy", "network", "kernel_seconds")
    for device, by_source in factors().items():
        for source, values in by_source.items():
            rows.append((device, source or "none", *(values.get(name, "") for name in names)))
    return table(
        ("device", "left out", "clock", "copies", "messages between nodes", "s to start a kernel"), rows
    )
