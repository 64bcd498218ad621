"""How close do steps in units of unlike length come to their plans?  (gloo, stages that sleep by tokens)

    python -m benchmarks.runtime.slice_steps [--seconds 6] [--repeats 3]

Sequences of a step that is drawn as in benchmarks.schedules.lengths are cut into units and planned, by list
scheduling within a limit and in the order of a family.  Stages on four ranks sleep for as long as their
units take and keep as many bytes.  Writes results/slice_steps.md.
"""

from dataclasses import replace
from statistics import median
from typing import Annotated, NamedTuple

import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.runtime.machine import cores_awake, pin_to_core
from benchmarks.schedules.lengths import steps
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.plan import Plan, Planner
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement, v
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from tests.support.ranks import run_ranks
from tests.support.unit_stages import steps_of

RANKS, MICROBATCHES = 4, 8
FAMILIES = "1f1b", "zb-h1", "v-half"
CASES = [
    *(
        (lengths, "list scheduling", limit)
        for lengths in ("prolong 64K", "wlbllm 128K")
        for limit in (0.5, 0.3)
    ),
    *(("prolong 64K", family, None) for family in FAMILIES),
]
"""The lengths, the order, and the part of 1F1B's tokens that is the limit; None: the order's own peak."""

UNIT = 8192
BYTES = 2
"""The bytes of activations of a token on each rank: a whole number for each of two chunks."""


class Case(NamedTuple):
    """A planned step, and the seconds for which a rank sleeps for 1 of it."""

    timeline: Timeline
    scale: float


def planned(name: str, order: str, limit: float | None) -> Timeline:
    """Return the planned step."""
    step: Microbatches = next(steps(name, None, MICROBATCHES, 1))
    if order in FAMILIES:
        request = named(order, RANKS, MICROBATCHES)
        placement = request.placement

        def of_family(count: int) -> Schedule:
            return make(named(order, RANKS, count)).schedule

        planner = planner_of(placement)
        return _timeline(planner, planner.in_family(of_family, planner.cut(step.documents, UNIT)))
    assert limit is not None
    planner = planner_of(v(RANKS))
    most = limit * BYTES * sum(sorted(step.tokens, reverse=True)[:RANKS])
    return _timeline(planner, planner.plan(planner.cut(step.documents, UNIT), limits=[most] * RANKS))


def planner_of(placement: Placement) -> Planner:
    """Return a planner whose ranks keep ``BYTES`` of each token; attention costs what else does at 24,576."""
    rates = LengthCosts.with_attention(Costs.per_rank(RANKS, placement.chunks), 1)
    stages = tuple(replace(stage, activation=BYTES * stage.activation) for stage in rates.stages)
    return Planner(placement, replace(rates, stages=stages))


def _timeline(planner: Planner, plan: Plan) -> Timeline:
    return simulate(planner.timed(plan).schedule, planner.costs(plan.units))


def measure(rank: int, cases: list[Case], repeats: int) -> list[tuple[list[float], int]]:
    """Return the result of ``steps_of`` on a rank that is bound to a core."""
    pin_to_core(rank)
    return steps_of(rank, [(timeline.schedule, timeline.costs, scale) for timeline, scale in cases], repeats)


def main(
    out: Out = RESULTS / "slice_steps.md",
    seconds: Annotated[float, typer.Option(help="How long a planned step is to take.")] = 6.0,
    repeats: Annotated[int, typer.Option(help="Steps of each case that count.")] = 3,
) -> None:
    """Measure all cases and write a table."""
    cases = [Case(timeline, seconds / timeline.makespan) for timeline in (planned(*case) for case in CASES)]
    with cores_awake():
        results = run_ranks(measure, RANKS, cases, repeats, timeout=3600)
    rows = list[Row]()
    for at, ((name, order, limit), (timeline, _)) in enumerate(zip(CASES, cases, strict=True)):
        step_times = [
            max(of_ranks) for of_ranks in zip(*(of_rank[at][0] for of_rank in results), strict=True)
        ]
        peak = max(of_rank[at][1] for of_rank in results)
        rows.append(
            (
                name,
                order if limit is None else f"{order}, {limit}",
                timeline.schedule.microbatches,
                f"{1e3 * seconds:.0f}",
                f"{1e3 * median(step_times):.0f}",
                f"{median(step_times) / seconds:.3f}",
                f"{max(timeline.peak_memory) / BYTES:,.0f}",
                f"{peak / BYTES:,.0f}",
            )
        )
    publish(
        out,
        "Steps in units against their plans",
        f"p = {RANKS}, m = {MICROBATCHES}, units of at most {UNIT:,} tokens, a V under list scheduling; the "
        f"median of {repeats} steps. Limits are parts of the tokens that 1F1B keeps. Peaks are the tokens "
        "whose activations the fullest rank keeps at most, planned and measured.",
        table(
            (
                "lengths",
                "order",
                "units",
                "planned ms",
                "median ms",
                "median/planned",
                "planned peak",
                "peak",
            ),
            rows,
        ),
    )


if __name__ == "__main__":
    typer.run(main)
