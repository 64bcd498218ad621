"""Are the orders of microbatches good for lengths that nobody had in mind?  Writes results/other_lengths.md.

    python -m benchmarks.schedules.other_lengths

Lengths of two kinds, with a long tail, uniform ones, and a giant among short ones, for many sizes of a step.
One process, no GPU; some minutes on one core.
"""

import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.schedules.lengths import SCHEDULES, costs_by_length, in_order
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.comparison import RULE, SEARCH, side_by_side
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.plan import Planner, Template

RANKS, MICROBATCHES = (4, 8, 16), (8, 16, 32, 64)
_GIANT = 131_072
_ROUNDING = 1e-9

Draw = Callable[[np.random.Generator], float]

LENGTHS: dict[str, tuple[int, Draw]] = {
    "two kinds, 500 and 60,000": (
        65_536,
        lambda random: random.choice([500, 60_000], p=[0.93, 0.07]) * random.uniform(0.7, 1.3),
    ),
    "Pareto, exponent 1.1": (65_536, lambda random: min(400 * (1 + random.pareto(1.1)), _GIANT)),
    "uniform to 32,768": (65_536, lambda random: random.uniform(1, 32_768)),
    "one of 131,072, others 1,100": (16_384, lambda random: random.lognormal(7, 0.5)),
}
"""The mean tokens of a microbatch, and how a length is drawn."""


def drawn(name: str, microbatches: int, random: np.random.Generator) -> Microbatches:
    """Return a step, packed in the order in which documents come."""
    mean, draw = LENGTHS[name]
    lengths: list[int] = []
    while sum(lengths) < microbatches * mean:
        lengths.append(int(draw(random)) + 1)
    packed = in_order(lengths, microbatches)
    while len(packed) > microbatches:
        packed.sort(key=sum)
        packed[0] = packed.pop(0) + packed[0]
    random.shuffle(packed)
    if "one of" in name:
        packed[int(random.integers(microbatches))] = [_GIANT]
    return Microbatches.of(packed)


def main(out: Out = RESULTS / "other_lengths.md", trials: int = 3) -> None:
    """Compare, and write the tables."""
    random = np.random.default_rng(11)
    rows, times = list[Row](), list[float]()
    worse_search = worse_rule = steps = 0
    for name in LENGTHS:
        for schedule in SCHEDULES:
            ratios = defaultdict[str, list[float]](list)
            for ranks in RANKS:
                for microbatches in MICROBATCHES:
                    template = Template(make(named(schedule, ranks, microbatches)).schedule)
                    placement = template.schedule.placement
                    by_length = costs_by_length(ranks, placement.chunks)
                    planner = Planner(placement, by_length)
                    for _ in range(trials):
                        step = drawn(name, microbatches, random)
                        units, work = planner.whole(step.documents), sum(by_length.work(step)) / ranks
                        plans = side_by_side(planner, template, units)
                        begin = time.process_time()
                        planner.plan(units, "search", template=template)
                        times.append(1e3 * (time.process_time() - begin))
                        for order, plan in plans.items():
                            ratios[order].append(plan.seconds / work)
                        shortest = min(plan.seconds for order, plan in plans.items() if order != SEARCH)
                        steps += 1
                        worse_search += plans[SEARCH].seconds > shortest * (1 + _ROUNDING)
                        by_weight = plans["light-heavy-light"].seconds
                        worse_rule += plans[RULE].seconds > by_weight * (1 + _ROUNDING)
            rows.append((name, schedule, *(f"{sum(values) / len(values):.3f}" for values in ratios.values())))
    times.sort()
    sizes = f"{', '.join(map(str, RANKS))} ranks and {', '.join(map(str, MICROBATCHES))} microbatches"
    about = f"Means of {trials} steps for each of {sizes}; equal stages, messages take no time."
    counted = (
        f"Of {steps} steps, {worse_search} were longer searched than in the best of the other orders, and "
        f"{worse_rule} longer by rule than light-heavy-light. A search took {times[steps // 2]:.0f} ms of "
        f"processor time in the median and {times[int(0.95 * steps)]:.0f} ms in the 95th percentile."
    )
    head = ("steps over work", "schedule", *ratios)
    publish(out, "Orders for other lengths", about, table(head, rows), counted)


if __name__ == "__main__":
    typer.run(main)
