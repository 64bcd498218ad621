"""How long are steps of unlike microbatches within a memory limit?  Writes results/lengths_within.md.

    python -m benchmarks.schedules.lengths_within

``flex`` is compiled for equal microbatches, and each step is planned within its limit in tokens, in
the order of its actions and by list scheduling alone.  One process, no GPU; a minute or two on one core.
"""

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.schedules.lengths import WINDOWS, costs_by_length, steps
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.plan import Planner, Template
from megatron_pp_ext.schedule.costs import CostModel, Costs

PARTS = 0.4, 0.6, 0.8, 1.0
"""The limits, as parts of what 1F1B keeps of a step."""


def main(
    out: Out = RESULTS / "lengths_within.md",
    files: Annotated[
        Path | None, typer.Option(help="A folder with the whole lists.", metavar="FOLDER")
    ] = None,
    ranks: int = 8,
    microbatches: int = 16,
    trials: int = 6,
) -> None:
    """Compare, and write the table."""
    rows = list[Row]()
    for name in WINDOWS:
        for part in PARTS:
            request = named("flex", ranks, microbatches, limit=part)
            schedule = make(
                request, CostModel(lambda placement: Costs.per_rank(ranks, placement.chunks))
            ).schedule
            template, rates = Template(schedule), costs_by_length(ranks, schedule.placement.chunks)
            planner = Planner(schedule.placement, rates)
            ratios = defaultdict[str, list[float]](list)
            for step in steps(name, files, microbatches, trials):
                costs, work = rates.of(step), sum(rates.work(step)) / ranks
                units = planner.whole(step.documents)
                least = planner.least_limits(units)
                limits = tuple(map(max, request.budget(costs).ranks, least))
                for how in ("rule", "search"):
                    plan = planner.plan(units, how, template=template, limits=limits)
                    ratios[f"order, {how}"].append(plan.seconds / work)
                listed = planner.plan(units, limits=limits)
                ratios["list scheduling of whole microbatches"].append(listed.seconds / work)
            rows.append((name, part, *(f"{sum(each) / len(each):.3f}" for each in ratios.values())))
    about = (
        f"Means of {trials} steps of {microbatches} microbatches on {ranks} ranks, over the work of a rank. "
        "A limit is a part of what 1F1B keeps of the step, and no less than the largest microbatch."
    )
    publish(out, "Unlike microbatches within a limit", about, table(("lengths", "limit", *ratios), rows))


if __name__ == "__main__":
    typer.run(main)
