"""What do finer units change where a limit holds few of them?  Writes results/finer_units.md.

    python -m benchmarks.schedules.finer_units

Steps of seven distributions in units of at most 8,192 tokens, as they are and as ``Planner.finer`` cuts them
within a limit.  Each unit costs 128 tokens on top of its own.  One process, no GPU; a minute on one core.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.schedules.lengths import WINDOWS, costs_by_length, distribution, in_order
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.plan import Planner
from megatron_pp_ext.features.units.rates import OVERHEAD
from megatron_pp_ext.schedule.placement import v

UNIT, LIMITS, SEED = 8192, (1.0, 0.5, 0.25), 7


def _chat(random: np.random.Generator) -> Any:
    """Return lengths of short exchanges: lognormal, of 900 tokens on average."""
    return np.clip(np.exp(random.normal(np.log(900) - 1.1**2 / 2, 1.1, 60_000)), 16, 8192).astype(int)


ASSUMED: dict[str, tuple[int, Callable[[np.random.Generator], Any]]] = {
    "chat 8K": (8192, _chat),
    "bimodal 64K": (65_536, lambda random: random.choice([1024, 65_536], 60_000, p=[0.9, 0.1])),
    "equal 32K": (32_768, lambda random: np.full(1, 32_768)),
    "uniform 32K": (32_768, lambda random: random.integers(64, 32_769, 60_000)),
}
"""The tokens of a microbatch, and lengths that are drawn from no data."""


def steps(name: str, microbatches: int, trials: int) -> Iterator[Microbatches]:
    """Yield steps of so many ``microbatches``, always the same."""
    if name in WINDOWS:
        window, lengths = WINDOWS[name], distribution(name, None)
    else:
        window, draw = ASSUMED[name]
        lengths = draw(np.random.default_rng(1))
    random = np.random.default_rng(SEED)
    for _ in range(trials):
        documents: list[int] = []
        while sum(documents) + (length := int(random.choice(lengths))) <= microbatches * window:
            documents.append(length)
        packed = in_order(documents, microbatches)
        while len(packed) > microbatches:
            packed.sort(key=sum)
            lightest = packed.pop(0)
            packed[0] = packed[0] + lightest
        yield Microbatches.of(packed)


def _compared(planner: Planner, drawn: list[Microbatches], limit: float) -> str:
    """Return the mean step over the work of a rank, before and after, and the mean number of units."""
    ranks, results = planner.placement.ranks, list[tuple[float, ...]]()
    for step in drawn:
        limits = [limit * sum(sorted(step.tokens, reverse=True)[:ranks])] * ranks
        units = planner.cut(step.documents, UNIT)
        finer = planner.finer(units, limits)
        work = sum(planner.rates.work(step)) / ranks
        before, after = (planner.plan(each, limits=limits).seconds / work for each in (units, finer))
        results.append((before, after, len(units), len(finer)))
    before, after, few, many = np.array(results).mean(axis=0)
    return (
        f"{before:.3f}, {few:.0f}" if many == few else f"{before:.3f}, {few:.0f} -> {after:.3f}, {many:.0f}"
    )


def main(
    out: Out = RESULTS / "finer_units.md",
    trials: Annotated[int, typer.Option(help="Steps of each distribution.")] = 3,
) -> None:
    """Compare, and write the table."""
    rows = list[Row]()
    for ranks in (8, 4):
        planner = Planner(v(ranks), costs_by_length(ranks, 2), overhead=OVERHEAD)
        for name in (*WINDOWS, *ASSUMED):
            drawn = list(steps(name, 2 * ranks, trials))
            rows.append((name, ranks, *(_compared(planner, drawn, limit) for limit in LIMITS)))
    publish(
        out,
        "Finer units where a limit holds few",
        f"Means of {trials} steps of 2 microbatches a rank, in units of at most {UNIT:,} tokens: the step "
        "over the work of a rank, and the number of units, before and after finer ones are tried; once where "
        "they stay.  Limits are parts of 1F1B's peak tokens.",
        table(("lengths", "ranks", *map(str, LIMITS)), rows),
    )


if __name__ == "__main__":
    typer.run(main)
