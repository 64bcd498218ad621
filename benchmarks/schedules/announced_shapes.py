"""What do messages cost that announce their shapes?  Writes results/announced_shapes.md.

    python -m benchmarks.schedules.announced_shapes

Simulated steps in which the host of a rank that posts the receive of an announced message stops until its
sender is there, over steps whose shapes are known.  Microbatches are equal, or drawn from public lengths and
run in the order of the data.  One process, no GPU; a minute or two on one core.
"""

from collections.abc import Iterator
from itertools import product
from typing import Annotated

import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.schedules.lengths import WINDOWS, costs_by_length, steps
from megatron_pp_ext.features.units.plan import Planner, Template
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Announced, Schedule
from megatron_pp_ext.schedule.costs import Costs
from tests.support.few_sends import step_seconds

FAMILIES = "1f1b", "interleaved", "zb-h1", "v-half", "v-zb", "1f1b-v", "dualpipe-v", "gpipe"
EQUAL = "equal"
HOP = 0.05
"""What a message takes in one of the tables, and as much again what announces it, in parts of a forward."""

WAYS = {
    "every one, receives as with known shapes": (Announced.EVERY, False),
    "every one, late receives": (Announced.EVERY, True),
    "first of a rank, receives as with known shapes": (Announced.FIRST, False),
    "first of a rank, late receives": (Announced.FIRST, True),
}
"""Which activations announce their shapes, and whether their receives are posted late."""


def cases(schedule: Schedule, lengths: str, trials: int, is_timed: bool) -> Iterator[tuple[Schedule, Costs]]:
    """Yield schedules with the costs of steps; ``is_timed`` has ranks launch by these."""
    if lengths == EQUAL:
        yield schedule, Costs.per_rank(schedule.ranks, schedule.placement.chunks)
        return
    template, rates = Template(schedule), costs_by_length(schedule.ranks, schedule.placement.chunks)
    planner = Planner(schedule.placement, rates)
    for step in steps(lengths, None, schedule.microbatches, trials):
        units = planner.whole(step.documents)
        plan = planner.plan(units, "given", template=template)
        yield (planner.timed(plan) if is_timed else plan).schedule, planner.costs(units)


def rows(
    ranks: int, microbatches: int, lengths: str, trials: int, is_timed: bool = False, hop: float = 0.0
) -> list[Row]:
    """Return a row for each family: the mean of steps over those with known shapes."""
    result = list[Row]()
    for family in FAMILIES:
        schedule = catalog.build(family, ranks, microbatches)
        steps = list(cases(schedule, lengths, trials, is_timed))
        known_seconds = [step_seconds(step, costs, hop=hop) for step, costs in steps]
        means = []
        for announced, is_late in WAYS.values():
            seconds = [step_seconds(step, costs, announced, is_late, hop) for step, costs in steps]
            means.append(sum(a / k for a, k in zip(seconds, known_seconds, strict=True)) / len(steps))
        result.append((family, *(f"{mean:.3f}" for mean in means)))
    return result


def main(
    out: Out = RESULTS / "announced_shapes.md",
    sizes: Annotated[list[str] | None, typer.Option(help="Ranks and microbatches, as 4x16.")] = None,
    trials: Annotated[int, typer.Option(help="Steps of each kind of lengths.")] = 3,
) -> None:
    """Compare, and write the tables."""
    sections = list[str]()
    tables = [(EQUAL, False, 0.0), (EQUAL, False, HOP), *product(WINDOWS, (False, True), (0.0,))]
    for size in sizes or ("4x16", "8x16", "8x64"):
        ranks, microbatches = map(int, size.split("x"))
        for lengths, is_timed, hop in tables:
            launch = ", launched by their times" * is_timed
            messages = f", messages take {hop:.0%} of a forward" if hop else ""
            rows_of_table = rows(ranks, microbatches, lengths, trials, is_timed, hop)
            sections.append(f"## {ranks} ranks, {microbatches} microbatches: {lengths}{launch}{messages}")
            sections.append(table(("schedule", *WAYS), rows_of_table))
    about = (
        "Steps over those with known shapes, in whose simulation messages take no time, if nothing else is "
        f"said; means of {trials} steps with unlike lengths in the order of the data. A rank launches as if "
        "microbatches were equal, or by their times."
    )
    publish(out, "Messages that announce their shapes", about, *sections)


if __name__ == "__main__":
    typer.run(main)
