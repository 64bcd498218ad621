"""Is a schedule for one limit a rank ever longer than the one for the least of these limits alone?

    python -m benchmarks.schedules.limits_by_rank

It need not be: the order for the least limit keeps all of them.  Draws limits, costs and sizes, and compiles
both.  One process, no GPU; some minutes on one core.  Writes results/limits_by_rank.md.
"""

import os
import tempfile
from random import Random
from typing import Annotated

import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.schedules.comparison import UNEQUAL, Times, costs_of, verdict
from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.schedule.placement import v

TIMES: tuple[Times, ...] = (UNEQUAL, (1, 1.1, 0.7, 0.05), (10, 10, 5, 0), (1, 2, 1, 0.1))
SHAPES = "rising", "falling", "ends lower", "any"


def drawn(random: Random) -> tuple[int, int, Times, str, list[int]]:
    """Return ranks, microbatches, times, how the limits go, and the limits in chunks of a V."""
    p = random.choice((4, 8, 8, 16))
    m, times, shape = p * random.choice((2, 4)), random.choice(TIMES), random.choice(SHAPES)
    least, more = random.randint(2 * p // 3 + 2, p + 4), random.choice((1, 2, 4))
    above = {
        "rising": [more * rank // (p - 1) for rank in range(p)],
        "falling": [more * (p - 1 - rank) // (p - 1) for rank in range(p)],
        "ends lower": [0, *[more] * (p - 2), 0],
        "any": [random.randint(0, more) for _ in range(p)],
    }
    return p, m, times, shape, [least + extra for extra in above[shape]]


def main(
    out: Out = RESULTS / "limits_by_rank.md",
    cases: Annotated[int, typer.Option(help="Draws.")] = 30,
) -> None:
    """Compile, compare and write the table."""
    random, rows = Random(1), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEGATRON_PP_EXT_CACHE"] = folder
        for _ in range(cases):
            p, m, times, shape, limits = drawn(random)
            costs = costs_of(v(p), times)
            of_limits, least = (
                compile_schedule(p, m, costs, limit, placements=[v(p)]) for limit in (limits, min(limits))
            )
            makespan, goal = of_limits.timeline.makespan, least.timeline.makespan
            lengths = makespan, goal, of_limits.lower_bound, verdict(makespan, goal)
            rows.append((p, m, times, f"{shape}, {min(limits)} to {max(limits)}", *lengths))
    head = ("p", "m", "F, I, W, hop", "limits", "for each rank", "for the least", "lower bound", "")
    publish(out, "Limits by rank", "Makespans of V placement.", table(head, rows))


if __name__ == "__main__":
    typer.run(main)
