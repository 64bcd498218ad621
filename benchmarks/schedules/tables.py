"""How good are compiled schedules?  Writes results/schedules.md and results/schedules.png.

    python -m benchmarks.schedules.tables

One process, no GPU; about a quarter of an hour on one core.  Every compiled schedule is simulated by
``schedule.simulate``; nothing comes from the cache.
"""

import os
import sys
import tempfile
from typing import Annotated

import typer

from benchmarks.measuring import use_of
from benchmarks.report import RESULTS, Out, Row, picture_of, publish, sections, table
from benchmarks.schedules.comparison import UNEQUAL
from benchmarks.schedules.frontier import frontiers
from benchmarks.schedules.known import best_known, memory_limited
from benchmarks.schedules.proved import optima


def speed() -> str:
    """Time and memory of whole processes that compile one schedule."""
    rows: list[Row] = []
    for p, m, limit in ((16, 64, 12), (16, 64, 18), (64, 512, 44), (128, 1024, 88)):
        program = (
            "from megatron_pp_ext.compiler.compile import compile_schedule; "
            "from megatron_pp_ext.schedule.costs import Costs, StageCosts; "
            f"forward, i, w, hop = {UNEQUAL}; "
            f"costs = Costs((StageCosts(forward, i, w),) * {2 * p}, hop); "
            f"found = compile_schedule({p}, {m}, costs, {limit}); "
            "print(found.timeline.makespan, f'{found.lower_bound:g}', found.origin, sep='; ')"
        )
        use = use_of([sys.executable, "-c", program])
        fields = use.output.strip().split("; ")
        rows.append((p, m, UNEQUAL, limit, *fields, f"{use.processor_seconds:.1f}", f"{use.peak_mib:.0f}"))
    head = ("p", "m", "F, I, W, hop", "limit", "makespan", "lower bound", "origin", "processor s", "MiB")
    return table(head, rows)


PARTS = {
    "Speed": speed,
    "Best known makespans": best_known,
    "Proved optima": optima,
    "The pipelines of arXiv 2401.10241, table 5, under a memory limit": memory_limited,
}


def main(
    out: Out = RESULTS / "schedules.md",
    only: Annotated[str, typer.Option(help="Only sections with this in their title.")] = "",
) -> None:
    """Compile, compare and write the tables and the picture."""
    parts = {title: part for title, part in PARTS.items() if only in title}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEGATRON_PP_EXT_CACHE"] = folder
        text = sections(parts)
        if only in "Frontier":
            picture = picture_of(out, "schedules")
            text += ["## Frontier", f"![frontier]({picture.name})", frontiers(picture)]
    about = (
        "One core is used. Lengths are makespans, first start to last end over all ranks, unless a column "
        "says span. Times are those of one chunk's action."
    )
    publish(out, "Compiled schedules", about, *text)


if __name__ == "__main__":
    typer.run(main)
