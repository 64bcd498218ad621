"""The range in which a step is expected, and how many steps of publishers that were left out it covers.

python -m benchmarks.planner.error_ranges               # a minute of a core
python -m benchmarks.planner.error_ranges --runs RUNS   # estimates the runs of ``found_runs`` again, too

Writes error_ranges.json, planner/validation.json, results/error_ranges.md, and its first table into
docs/planner.md; README.md states its errors in whole percent.  Every step is estimated with
factors that were fitted without its publisher.  Without RUNS, the steps that are no part of this project keep
the errors of the last time.
"""

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from benchmarks.planner import found_factors, held_out
from benchmarks.planner.found_runs import FoundRun, asked, found, machine_of, publisher_of
from benchmarks.report import RESULTS, Out, Row, publish, sections, table
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.step import error_band
from megatron_pp_ext.planner.step.estimate import estimate_request

FILE = Path(__file__).with_suffix(".json")
DOCUMENT = Path(__file__).parents[2] / "docs" / "planner.md"
VALIDATION = Path(error_band.__file__).parents[1] / "validation.json"

_OUTSIDE = 0.11
"""The part of the ratios on either side of a range before it is widened: one figure for all kinds, in
hundredths, with which ranges cover 8 in 10 steps of publishers that were left out."""

type Ratios = Mapping[str, Mapping[str, Sequence[float]]]
"""Measured seconds over estimated ones, by kind and by publisher."""


@dataclass(frozen=True, slots=True)
class Step:
    """A published step with its estimate; ``ratio`` is measured over estimated seconds."""

    kind: str
    publisher: str
    ratio: float
    system: str
    schedule: str
    length: int
    context: int


def of_project() -> Iterator[Step]:
    """Yield the steps of ``reference.training_runs``."""
    for result in held_out.held_out():
        model = result.run.model
        yield Step(
            result.kind,
            publisher_of(result.run.source),
            1 / result.ratio,
            result.run.gpu,
            result.schedule,
            model["seq_length"],
            model.get("context_parallel_size") or 1,
        )


def of_others(folder: Path) -> Iterator[Step]:
    """Yield the steps of ``found_runs`` that can be estimated, without those of an older recipe's flags."""
    for run in found(folder):
        if not run.is_doubtful and not run.why_outside:
            try:
                yield _step(run)
            except ValueError:
                continue


def _step(run: FoundRun) -> Step:
    machine, factors = machine_of(run), found_factors.held_out(run)
    machine = held_out.with_factors(machine, factors) if factors else machine
    job = asked(run)
    request = for_world(job, run.gpus)
    seconds = estimate_request(job, machine, request).step_seconds
    return Step(
        error_band.kind_of(job, machine, run.gpus),
        run.publisher,
        run.seconds / seconds,
        machine.name,
        request.schedule,
        job.model.seq_length,
        job.parallel.context_parallel_size or 1,
    )


def ratios(steps: Iterable[Step]) -> Ratios:
    """Return the ratios of ``steps``, rounded, in the order of ``error_band.KINDS``."""
    groups: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in error_band.KINDS}
    for step in steps:
        groups[step.kind][step.publisher].append(round(step.ratio, 3))
    return {kind: {name: sorted(group[name]) for name in sorted(group)} for kind, group in groups.items()}


def without(every: Ratios, publisher: str) -> Ratios:
    """Return the ratios of all publishers but one."""
    return {
        kind: {name: values for name, values in group.items() if name != publisher}
        for kind, group in every.items()
    }


def range_of(every: Ratios, kind: str) -> tuple[float, float]:
    """Return between which ratios a step of ``kind`` of another publisher is expected.

    The publishers of the kind count the same, and all of other kinds together as much as one of them.  What
    is between the outer parts of these is widened around the median by the root of 1 + 1/n for n publishers
    in this sense: so much more does a further one differ from their mean than they do.
    """
    groups = [[(value, 1 / len(group)) for value in group] for group in every[kind].values()]
    others = [group for name, groups in every.items() if name != kind for group in groups.values()]
    groups.append([(value, 1 / len(group) / len(others)) for group in others for value in group])
    weighted = sorted(pair for group in groups for pair in group)
    low, middle, high = (_quantile(weighted, part) for part in (_OUTSIDE, 0.5, 1 - _OUTSIDE))
    wider = (1 + 1 / len(groups)) ** 0.5
    return middle * (low / middle) ** wider, middle * (high / middle) ** wider


def _quantile(weighted: Sequence[tuple[float, float]], part: float) -> float:
    """Return the first of the values, which rise, with which ``part`` of all weights is reached."""
    reached = list(accumulate(weight for _, weight in weighted))
    return weighted[min(bisect_left(reached, part * reached[-1]), len(weighted) - 1)][0]


def covered(every: Ratios) -> Mapping[str, Mapping[str, int]]:
    """Return how many ratios are in the range that is made without their publisher, by kind and publisher."""
    counts: dict[str, dict[str, int]] = {}
    for kind, group in every.items():
        counts[kind] = {}
        for publisher, values in group.items():
            low, high = range_of(without(every, publisher), kind)
            counts[kind][publisher] = sum(low <= value <= high for value in values)
    return counts


def error(group: Mapping[str, Sequence[float]]) -> float:
    """Return the mean absolute error of the estimates, each relative to the measured seconds."""
    return mean(abs(1 / value - 1) for values in group.values() for value in values)


type Limits = Mapping[str, Any]
"""The systems and schedules of steps of a kind, their longest sequence, and most context-parallel ranks."""


def limits(steps: Iterable[Step]) -> Mapping[str, Limits]:
    """Return the limits of ``steps``, by kind."""
    of_kinds: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        of_kinds[step.kind].append(step)
    return {
        kind: {
            "systems": sorted({step.system for step in group}),
            "schedules": sorted({step.schedule for step in group}),
            "length": max(step.length for step in group),
            "context": max(step.context for step in group),
        }
        for kind, group in of_kinds.items()
    }


def validation(every: Ratios, limits_of_kinds: Mapping[str, Limits]) -> Mapping[str, Mapping[str, Any]]:
    """Return the content of validation.json; see ``error_band``."""
    content = {}
    for kind, group in every.items():
        low, high = (round(end, 3) for end in range_of(every, kind))
        counts = {"rows": sum(map(len, group.values())), "publishers": len(group)}
        figures = {"low": low, "high": high, "error": round(error(group), 3)}
        content[kind] = {**figures, **counts, **limits_of_kinds[kind]}
    return content


def stored() -> dict[str, Any]:
    """Return the ratios of this project's runs and of the others, and the limits of both, as written."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def joined(content: Mapping[str, Any]) -> Ratios:
    """Return the ratios of both."""
    parts: Sequence[Ratios] = (content["project"], content["others"])
    return {
        kind: {
            name: sorted(value for part in parts for value in part[kind].get(name, ()))
            for name in sorted({name for part in parts for name in part[kind]})
        }
        for kind in error_band.KINDS
    }


def table_of_kinds() -> str:
    """The range is made of all rows; a row counts as covered where the range without its publisher has it."""
    every = joined(stored())
    counts, rows = covered(every), list[Row]()
    for kind, group in every.items():
        low, high = range_of(every, kind)
        inside, total = sum(counts[kind].values()), sum(map(len, group.values()))
        shown = f"{inside} of {total}, {inside / total:.0%}"
        rows.append((kind, len(group), total, f"{error(group):.1%}", f"{low:.2f} to {high:.2f}", shown))
    inside = sum(sum(group.values()) for group in counts.values())
    total = sum(len(values) for group in every.values() for values in group.values())
    rows.append(("all", "", total, "", "", f"{inside} of {total}, {inside / total:.0%}"))
    head = ("kind", "publishers", "steps", "mean error", "measured over estimated", "covered when left out")
    return table(head, rows)


def table_of_publishers() -> str:
    """The same for each publisher: the range is made without it."""
    every = joined(stored())
    counts = covered(every)
    rows: list[Row] = []
    for kind, group in every.items():
        for name, values in group.items():
            low, high = range_of(without(every, name), kind)
            shown = f"{counts[kind][name]} of {len(values)}"
            rows.append((kind, name, f"{error({name: values}):.1%}", f"{low:.2f} to {high:.2f}", shown))
    return table(("kind", "publisher left out", "mean error", "range without it", "covered"), rows)


def replaced(document: str, made: str) -> str:
    """Return ``document`` with the table ``made`` in place of the one with its head; ValueError if none."""
    head, *_ = made.splitlines()
    text, count = re.subn(rf"^{re.escape(head)}(\n\|.*)*", lambda _: made, document, count=1, flags=re.M)
    if not count:
        raise ValueError(f"{DOCUMENT} has no table with the head {head}")
    return text


PARTS = {"By kind": table_of_kinds, "By publisher": table_of_publishers}


def main(
    out: Out = RESULTS / "error_ranges.md",
    folder: Annotated[Path | None, typer.Option("--runs", help="The folder of found_runs.")] = None,
) -> None:
    """Write the ratios, the ranges and the page."""
    steps = list(of_project())
    content = {"project": ratios(steps)}
    if folder:
        others = list(of_others(folder))
        content |= {"others": ratios(others), "limits": limits([*steps, *others])}
    else:
        content |= {name: stored()[name] for name in ("others", "limits")}
    text = json.dumps(content, indent=1)
    FILE.write_text(re.sub(r",\n\s+(?=[\d.])", ", ", text) + "\n", encoding="utf-8")
    made = json.dumps(validation(joined(content), content["limits"]), indent=1)
    VALIDATION.write_text(made + "\n", encoding="utf-8")
    text = replaced(DOCUMENT.read_text(encoding="utf-8"), table_of_kinds())
    DOCUMENT.write_text(text, encoding="utf-8")
    about = (
        "Steps of published runs, each estimated with the factors that were fitted without its publisher, "
        "and the range in which a step of a further publisher is expected."
    )
    publish(out, "How sure an estimate is", about, *sections(PARTS))


if __name__ == "__main__":
    typer.run(main)
