"""How far are estimates from published steps that no fit saw?

python -m benchmarks.planner.found_errors RUNS --before benchmarks/planner/found_before.json

RUNS is the folder of ``found_runs``; runs of ``reference.training_runs`` are compared too.  Each is estimated
with the factors that were fitted without its publisher (``found_factors``, ``held_out``).  BEFORE has the
errors of an earlier version, as ``--json`` writes them.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from benchmarks.planner import found_factors, held_out
from benchmarks.planner.found_runs import Compared, FoundRun, compared, found
from benchmarks.report import Row, table
from megatron_pp_ext.costs import system
from megatron_pp_ext.planner.step import error_band


@dataclass(frozen=True, slots=True)
class Errors:
    """The mean absolute and the mean relative error of so many ``runs``."""

    runs: int
    absolute: float
    bias: float


def estimated(run: FoundRun) -> Compared:
    """Return ``run`` with its estimate by the factors that were fitted without its publisher."""
    factors = found_factors.held_out(run)
    if not factors:
        return compared(run)
    try:
        return compared(run, held_out.with_factors(system.read(run.gpu), factors))
    except ValueError as error:
        return Compared(run, None, str(error))


def training_runs() -> Iterator[tuple[str, float]]:
    """Yield the kind of each run of ``reference.training_runs``, and its estimate over its measurement."""
    for result in held_out.held_out():
        device = result.run.gpu.upper()
        kinds = {
            error_band.HOPPER: f"dense, {device}",
            error_band.FP8_HOPPER: f"FP8, {device}",
            error_band.BLACKWELL: f"FP8, {device}",
            error_band.EXPERTS_HOPPER: f"experts, {device}",
        }
        yield kinds.get(result.kind, result.kind), result.ratio


def errors(ratios: Sequence[float]) -> Errors:
    """Return the errors of estimates over measurements."""
    return Errors(
        len(ratios),
        round(mean(abs(ratio - 1) for ratio in ratios), 4),
        round(mean(ratio - 1 for ratio in ratios), 4),
    )


def by_kind(every: Sequence[Compared]) -> Mapping[str, Errors]:
    """Return the errors of each kind, of ``every`` run and of those of ``training_runs``."""
    ratios = defaultdict(list)
    for comparison in every:
        if comparison.estimated is not None:
            ratios[comparison.run.kind].append(comparison.ratio)
    for kind, ratio in training_runs():
        ratios[kind].append(ratio)
    return {kind: errors(of_kind) for kind, of_kind in sorted(ratios.items())}


_APART = 1.05
"""How far apart two measured steps are whose order is judged, as a ratio."""


def orders(every: Iterable[Compared]) -> Iterator[Row]:
    """Yield for each group of runs how many pairs of them are ordered right, and of how many.

    A pair has the same publisher, model, devices and tokens, and other flags; in ``reference.training_runs``
    it is of the same source, kind and shape.
    """
    groups: dict[tuple[object, ...], list[tuple[float, float, object]]] = defaultdict(list)
    for comparison in every:
        run = comparison.run
        if comparison.estimated is not None and not run.is_doubtful:
            model = run.name.split()[run.publisher == "Megatron-Bridge"]
            key = "found_runs", run.publisher, model, run.gpu, run.gpus, _tokens(run.flags)
            groups[key].append((run.seconds, comparison.estimated, tuple(run.flags)))
    for number, result in enumerate(held_out.held_out()):
        values = result.run.model
        shape = tuple(values.get(name) for name in _SHAPE)
        key = result.run.source, result.kind, result.run.gpus, *shape
        assert result.run.seconds is not None
        groups[key].append((result.run.seconds, result.estimate.step_seconds, number))
    counts: dict[object, Counter[bool]] = defaultdict(Counter)
    for key, group in groups.items():
        for one, other in combinations(group, 2):
            short, long = sorted((one, other))
            if one[2] != other[2] and long[0] >= _APART * short[0]:
                counts[key[0]][short[1] < long[1]] += 1
    for name, count in counts.items():
        yield name, count[True], count.total(), f"{count[True] / count.total():.1%}"


_SHAPE = ("num_layers", "hidden_size", "seq_length", "global_batch_size")


def _tokens(flags: Sequence[str]) -> int:
    """Return the tokens of a step, by the last of each flag."""
    last = dict(pairwise(flags))
    return int(last["--global-batch-size"]) * int(last["--seq-length"])


def main(
    folder: Annotated[Path, typer.Argument(help="The folder of found_runs.")],
    before: Annotated[Path | None, typer.Option(help="The errors of an earlier version.")] = None,
    write: Annotated[Path | None, typer.Option("--json", help="Write the errors to a file.")] = None,
    each: Annotated[bool, typer.Option("--each", help="Print every run too.")] = False,
) -> None:
    """Print the errors of each kind, and why rows cannot be estimated."""
    every = list(map(estimated, found(folder)))
    estimates = [estimate for estimate in every if estimate.estimated is not None]
    errors_now = by_kind(every)
    old = json.loads(before.read_text(encoding="utf-8")) if before else {}
    print(f"{len(estimates)} of {len(every)} rows can be estimated\n")
    print(table(("kind", "runs", "absolute error", "mean error", "before", "before"), _rows(errors_now, old)))
    refused = Counter(estimate.why[:100] for estimate in every if estimate.estimated is None)
    print(table(("not estimated, since", "rows"), refused.most_common()))
    print(table(("pairs at least 5% apart", "ordered right", "of", ""), orders(every)))
    if each:
        print(table(("kind", "publisher", "run", "measured", "error"), map(_row, estimates)))
    if write:
        content = {kind: asdict(estimate) for kind, estimate in errors_now.items()}
        write.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _rows(now: Mapping[str, Errors], old: Mapping[str, Mapping[str, float]]) -> Iterator[Row]:
    for kind, errors in now.items():
        row = old.get(kind, {})
        was = (f"{row['absolute']:.1%}", f"{row['bias']:+.1%}") if row else ("", "")
        yield kind, errors.runs, f"{errors.absolute:.1%}", f"{errors.bias:+.1%}", *was


def _row(estimate: Compared) -> Row:
    run = estimate.run
    name = f"{run.name}, {run.gpus} {run.gpu}, {run.precision}"
    return run.kind, run.publisher, name, f"{run.seconds:.3f}", f"{estimate.ratio - 1:+.1%}"


if __name__ == "__main__":
    typer.run(main)
