"""Shows simulated schedules on the terminal and writes them to files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_pp_ext.cli.options import Files
from megatron_pp_ext.compiler.bounds import lower_bound
from megatron_pp_ext.schedule import csv_file
from megatron_pp_ext.schedule.simulate import Timeline
from megatron_pp_ext.view import terminal, trace_file

console = Console(highlight=False)


def bound_of(timeline: Timeline) -> float:
    """Return a bound on the makespan of all orders with this placement and no higher peak on any rank."""
    schedule = timeline.schedule
    bound = lower_bound(schedule.placement, schedule.microbatches, timeline.costs, timeline.peak_activations)
    return min(bound, timeline.makespan)


def record(timeline: Timeline, bound: float) -> dict[str, Any]:
    """Return the numbers of a schedule for a JSON file."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "chunks": schedule.placement.chunks,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "bubble_span": timeline.bubble_span,
        "peak_activation": list(timeline.peak_microbatches),
        "peak_messages": list(timeline.peak_messages),
        "lower_bound": bound,
        "digest": schedule.digest,
    }


def report(timeline: Timeline, bound: float, files: Files) -> None:
    """Print ``timeline`` and write the requested files."""
    name = timeline.schedule.name
    show({name: timeline}, files.paths)
    console.print(f"messages waiting: at most {max(timeline.peak_messages)} on a rank")
    above = timeline.makespan / bound - 1
    console.print(f"lower bound {bound:.5g}: " + (f"{above:.1%} above it" if above > 5e-4 else "optimal"))
    if files.csv is not None:
        csv_file.write(timeline.schedule, files.csv)
    if files.json is not None:
        files.json.write_text(json.dumps(record(timeline, bound), indent=1) + "\n", encoding="utf-8")
    if files.trace is not None:
        trace_file.write_timeline(files.trace, timeline)


def show(timelines: Mapping[str, Timeline], pictures: tuple[Path, ...]) -> None:
    """Print a sketch of each timeline and a table of all, and draw the requested pictures."""
    for timeline in timelines.values():
        console.print(terminal.Sketch(timeline))
    console.print(terminal.summary_table(timelines, with_messages=False))
    if pictures:
        # matplotlib takes half a second to import.
        from megatron_pp_ext.view import picture

        for path in pictures:
            picture.draw(timelines, path)
