"""Shows simulated schedules on the terminal, writes them to files, and reports what a command waits for."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import batched
from pathlib import Path
from threading import Timer
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from megatron_pp_ext import log_lines
from megatron_pp_ext.cli.options import Files
from megatron_pp_ext.compiler.bounds import lower_bound
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.files import write_json
from megatron_pp_ext.schedule.formats import csv_file, trace_file
from megatron_pp_ext.schedule.recorded import UnitNames
from megatron_pp_ext.schedule.simulate import Timeline
from megatron_pp_ext.view import page, terminal

console = Console(highlight=False, markup=False)
"""Names come from files: what looks like markup in them is text."""

_COLUMNS, _BETWEEN = 80, 2
"""The width of an ordinary terminal, and the space between two columns of a table of ranks."""


def folding(*names: str) -> Table:
    """Return a table whose long cells are folded."""
    return Table(*(Column(name, overflow="fold") for name in names), box=SIMPLE_HEAD)


def bound_of(timeline: Timeline) -> float:
    """Return a bound on the makespan of all orders with this placement and no higher peak on any rank.

    Where a schedule has copies it bounds all orders, since memory on the device then bounds none.
    """
    schedule, costs = timeline.schedule, timeline.costs
    limits = timeline.peak_activations
    if schedule.copies:
        limits = (schedule.microbatches * sum(stage.activation for stage in costs.stages),) * schedule.ranks
    bound = lower_bound(schedule.placement, schedule.microbatches, costs, limits, bool(schedule.paired))
    return min(bound, timeline.makespan)


def record(timeline: Timeline, bound: float, units: UnitNames) -> dict[str, Any]:
    """Return the numbers of a schedule for a JSON file."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.whole_microbatches,
        "chunks": schedule.placement.chunks,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "bubble_span": timeline.bubble_span,
        "peak_activation": list(timeline.peak_microbatches),
        "peak_messages": list(timeline.peak_messages),
        "lower_bound": bound,
        "pairs": len(schedule.paired),
        "copies": [
            {"stage": stage, "microbatch": microbatch, "back_before": str(action)}
            for (stage, microbatch), action in sorted(schedule.copies.reloads.items())
        ],
        "digest": schedule.digest,
        "time_unit": units.time,
        **({"units": schedule.microbatches} if schedule.units else {}),
    }


def require_size(request: Request, files: Files | None = None) -> None:
    """Raise ValueError, before anything is built, for a schedule too large to be simulated or drawn here."""
    actions = request.require_few_actions()
    if files is not None and files.paths:
        from megatron_pp_ext.view import picture

        picture.require_fit(request.ranks, actions)


def report(
    timeline: Timeline, bound: float, units: UnitNames, files: Files, notes: Iterable[str] = ()
) -> None:
    """Print ``timeline``, whose numbers are in ``units``, with ``notes``, and write the requested files."""
    schedule = timeline.schedule
    show({schedule.name: timeline}, units, files.paths)
    for note in notes:
        console.print(note)
    console.print(f"messages waiting: at most {max(timeline.peak_messages)} on a rank")
    above = timeline.makespan / bound - 1
    console.print(f"lower bound {bound:.5g}: " + (f"{above:.1%} above it" if above > 5e-4 else "optimal"))
    if files.csv is not None:
        csv_file.write(schedule, files.csv)
    if files.json is not None:
        write_json(files.json, record(timeline, bound, units))
    if files.trace is not None:
        trace_file.write_timeline(files.trace, timeline, units)


def show(timelines: Mapping[str, Timeline], units: UnitNames, pictures: tuple[Path, ...]) -> None:
    """Print a sketch of each timeline and a table of all, and draw the requested pictures."""
    for timeline in timelines.values():
        console.print(terminal.Sketch(timeline))
    console.print(terminal.summary_table(timelines, with_messages=False))
    print_units(units)
    for path in pictures:
        if path.suffix.lower() == page.SUFFIX:
            page.write(timelines, path, units.time)
            continue
        # matplotlib takes half a second to import.
        from megatron_pp_ext.view import picture

        picture.draw(timelines, path, units.time)


def show_by_rank(title: str, rows: Mapping[str, Sequence[str]]) -> None:
    """Print ``rows``, each with a text for every rank, in as many tables as an ordinary terminal needs."""
    ranks = len(next(iter(rows.values())))
    names = max(map(len, (title, *rows))) + _BETWEEN
    widest = max(len(text) for texts in rows.values() for text in texts)
    for batch in batched(range(ranks), max(1, (_COLUMNS - names) // (max(widest, 4) + _BETWEEN))):
        columns = (Column(str(rank), justify="right") for rank in batch)
        table = Table(title, *columns, box=None, pad_edge=False, padding=(0, _BETWEEN, 0, 0))
        for name, texts in rows.items():
            table.add_row(name, *(texts[rank] for rank in batch))
        console.print(table)


def print_units(units: UnitNames) -> None:
    """Print the meaning of the numbers of a summary."""
    console.print(f"times: {units.time}", style="dim")
    console.print("peak memory: activations of the fullest rank, in microbatches", style="dim")


_PATIENCE_SECONDS = 2.0

_PAUSE_SECONDS = 10.0
"""The least time between two lines."""


@contextmanager
def waiting(work: str) -> Iterator[Callable[[str], None]]:
    """Show that ``work`` is being done while the context lasts; on stderr where there is no terminal.

    Progress that the package logs meanwhile is shown after it, and so are lines passed to the function
    that this yields.
    """
    if console.is_terminal:
        # As Text, since names of files may look like markup.
        with console.status(Text(work)) as status:

            def update(line: str) -> None:
                status.update(Text(f"{work}: {line}"))

            with heard(update):
                yield update
        return
    lines = _ProgressLines(work)
    late = Timer(_PATIENCE_SECONDS, lines.show)
    late.daemon = True
    late.start()
    try:
        with heard(lines.take):
            yield lines.take
    finally:
        late.cancel()


def heard(show: Callable[[str], None]) -> AbstractContextManager[None]:
    """Return the context in which ``show`` gets the progress that the package logs."""
    return log_lines.shown("megatron_pp_ext", show)


class _ProgressLines:
    """The latest line about ``what``, for stderr: shown when asked for, and from then on now and then."""

    def __init__(self, work: str) -> None:
        self._what = self._latest = work
        self._stream = sys.stderr
        self._next = float("inf")

    def show(self) -> None:
        print(f"{self._latest} ...", file=self._stream, flush=True)
        self._next = time.monotonic() + _PAUSE_SECONDS

    def take(self, line: str) -> None:
        self._latest = f"{self._what}: {line}"
        if time.monotonic() >= self._next:
            self.show()
