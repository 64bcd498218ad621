"""What do slices of sequences change?  Writes results/slices.md.

    python -m benchmarks.schedules.slices

Steps are drawn as in benchmarks.schedules.lengths, and cut into units of at most so many tokens.  Limits are
parts of the tokens that 1F1B keeps of whole microbatches, the largest ones first.  A second part has equal
microbatches in k equal slices.  One process, no GPU; some minutes on one core.
"""

import math
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.schedules.lengths import WINDOWS, costs_by_length, steps
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.options import Slices
from megatron_pp_ext.features.units.plan import Planner
from megatron_pp_ext.features.units.sliced_orders import costs_in_units
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.placement import v
from megatron_pp_ext.schedule.simulate import simulate

SIZES = 8192, 4096, 2048, None
"""The most tokens of a unit; None chooses them by the simulated step."""

LIMITS = 0.5, 0.3, 0.25
OVERHEAD = 128.0
"""The tokens that a unit costs on top of its own where its size is chosen."""

SCHEDULES = "1f1b", "interleaved", "zb-h1", "v-half", "v-zb"


def unlike(ranks: int, microbatches: int, files: Path | None, trials: int) -> str:
    """Return the table of steps in units, as multiples of the work of whole microbatches."""
    rows, placement = list[Row](), v(ranks)
    rates = costs_by_length(ranks, placement.chunks)
    for name in WINDOWS:
        steps_drawn = list(steps(name, files, microbatches, trials))
        for size in SIZES:
            planner = Planner(placement, rates, overhead=0.0 if size else OVERHEAD)
            for limit in LIMITS:
                results = np.array([_planned(planner, step, size, limit, ranks) for step in steps_drawn])
                mean, bound, took, tokens = results.mean(axis=0)
                rows.append(
                    (
                        name,
                        f"{size:,}" if size else f"chosen, {tokens:,.0f} on average",
                        limit,
                        f"{mean:.3f}",
                        f"{results[:, 0].max():.3f}",
                        f"{bound:.3f}",
                        f"{1e3 * took:.0f}",
                    )
                )
    return table(("lengths", "unit", "limit", "step", "longest step", "lower bound", "plan, ms"), rows)


def _planned(
    planner: Planner, step: Microbatches, size: int | None, limit: float, ranks: int
) -> tuple[float, float, float, float]:
    """Return the step and its bound by the work of the whole, the seconds of the plan, and the unit."""
    most = limit * sum(sorted(step.tokens, reverse=True)[:ranks])
    limits = [most] * ranks
    tokens = size or planner.chosen_tokens(step.documents, limits)
    begin = time.process_time()
    plan = planner.timed(planner.plan(planner.cut(step.documents, tokens), limits=limits))
    took = time.process_time() - begin
    work = sum(planner.rates.work(step)) / ranks
    return plan.seconds / work, plan.lower_bound / work, took, tokens


def alike(ranks: int, microbatches: int) -> str:
    """Return the table of steps and peaks of equal microbatches, of which each takes F = I = W = 1 a rank."""
    rows = list[Row]()
    for schedule in (*SCHEDULES, "flex"):
        limits: tuple[float | None, ...] = (0.25, 0.5, 1.0) if schedule == "flex" else (None,)
        for limit in limits:
            row = list[str]()
            for slices in (1, 2, 4, 8):
                option = Slices(1, slices, overhead=0.0, equal_at=math.inf)
                request = named(schedule, ranks, microbatches, limit=limit).with_option(option)
                costs = CostModel(lambda placement: Costs.per_rank(ranks, placement.chunks))
                cut = make(request, costs).schedule
                step = simulate(cut, costs_in_units(request, costs, cut))
                row.append(f"{step.makespan:.2f}, {max(step.peak_microbatches):.2f}")
            rows.append((schedule if limit is None else f"{schedule} {limit}", *row))
    return table(("step, peak", "whole", "2 slices", "4 slices", "8 slices"), rows)


def main(
    out: Out = RESULTS / "slices.md",
    files: Annotated[
        Path | None, typer.Option(help="A folder with the whole lists.", metavar="FOLDER")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Pipeline ranks.")] = 8,
    microbatches: Annotated[int, typer.Option(help="Microbatches a step.")] = 16,
    trials: Annotated[int, typer.Option(help="Steps of each distribution.")] = 20,
) -> None:
    """Compare, and write the tables."""
    unlike(ranks, microbatches, files, 1)  # compiles the loops, which plans are not to be charged for
    publish(
        out,
        "Slices of sequences",
        f"{ranks} ranks with equal stages in a V, messages take no time.",
        "## Microbatches of unlike length",
        f"{trials} steps of {microbatches} microbatches each, over the work of a rank.  Limits are parts of "
        "1F1B's peak tokens.  Where the size of units is chosen, each costs "
        f"{OVERHEAD:.0f} tokens on top of its own, in the step and in the bound.",
        unlike(ranks, microbatches, files, trials),
        "## Equal microbatches",
        f"{ranks} microbatches, of which F, I and W take a rank 1 each; peaks are in microbatches.  `flex` "
        "has parts of 1F1B's peak as limits.",
        alike(ranks, ranks),
    )


if __name__ == "__main__":
    typer.run(main)
