"""Schedules for the terminal: a sketch of one, and a table that compares several."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.style import Style
from rich.table import Table
from rich.text import Text

from megatron_pp_ext.schedule.recorded import SECONDS, RecordedStep, extent, idle_times
from megatron_pp_ext.schedule.simulate import Event, Timeline
from megatron_pp_ext.view.colours import COPIES, colour, ink, parts

WAYS = {"out": "↓", "back": "↑"}
"""The marks of copies to the host and back."""

_END = 32
"""The number of ranks that a sketch shows at each end of a longer pipeline."""

_BANDS, _LINES = 4, 48
"""The most bands, one below the other, that a sketch has, and the most lines of ranks in all of them."""

_NAME, _UNLIMITED = 20, 10_000
"""The longest name that no table folds, and the width of a console on which nothing is too wide."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A timeline to print with rich: one line of coloured letters for each rank, within the console's width.

    A column is as long as the shortest action; it shows the action of the rank in the middle of it.  A
    timeline that is too long for the console goes on below, and one too long for ``_BANDS`` bands has longer
    columns, which a line then reports.  In a pair, columns show its forward and its backward by turns.
    Chunks after the first have darker colours.  Of many ranks only the first and the last are shown.  Where
    activations wait on the host, two more lines show a rank's copies to it and back.
    """

    timeline: Timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gutter = len(str(len(self.timeline.events) - 1)) + 1
        columns = max(options.max_width - gutter, 1)
        unit = min(end - start for events in self.timeline.events for _, start, end in events)
        ranks = range(len(self.timeline.events))
        bands = _columns(self.timeline.makespan, unit, columns)
        column = unit
        if bands > 1 and (bands > _BANDS or bands * len(ranks) > _LINES):
            column, bands = self.timeline.makespan / columns, 1
        left_out = ranks[_END:-_END]
        rows = {rank: [*self._rows(rank, column)] for rank in ranks if rank not in left_out}
        for band in range(bands):
            shown = slice(band * columns, (band + 1) * columns)
            for rank in ranks:
                if rank not in left_out:
                    for name, row in zip((f"{rank}", "", ""), rows[rank], strict=False):
                        head = Text(no_wrap=True).append(f"{name:>{gutter - 1}} ", style="dim")
                        yield head.append_text(row[shown])
                elif rank == left_out[0]:
                    yield Text(f"{'':{gutter}}ranks {rank} to {left_out[-1]} are not shown", style="dim")
            if band < bands - 1:
                begin = (band + 1) * columns * column
                yield Text(f"{'':{gutter}}the same from {begin:.4g} on:", style="dim")
        yield Text(
            f"{'':{gutter}}1 column = {column:.4g}, makespan {self.timeline.makespan:.5g}", style="dim"
        )
        if column > unit:
            yield Text(
                f"{'':{gutter}}some actions, of {unit:.4g}, are not shown: see --html FILE",
                style="dim",
            )

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the least and the most columns that a sketch may have."""
        return Measurement(20, options.max_width)

    def _rows(self, rank: int, column: float) -> Iterator[Text]:
        """Yield the line of a rank's actions, and those of its copies where there are any."""
        yield self._line(rank, column)
        if not self.timeline.copies:
            return
        for way, mark in WAYS.items():
            line = Text(no_wrap=True)
            times = [getattr(copied, way) for copied in self.timeline.copies[rank]]
            for index in range(_columns(self.timeline.makespan, column)):
                begin = self.timeline.start + index * column
                is_busy = any(start < begin + column and begin < end for start, end in times)
                line.append(mark if is_busy else " ", style=Style(color=COPIES[way]))
            yield line

    def _line(self, rank: int, column: float) -> Text:
        placement = self.timeline.schedule.placement
        line = Text(no_wrap=True)
        paired = self.timeline.schedule.paired
        following = iter(self.timeline.events[rank])
        event = next(following, None)
        other: Event | None = None
        for index in range(_columns(self.timeline.makespan, column)):
            middle = self.timeline.start + (index + 0.5) * column
            while event is not None and event.end <= middle:
                event, other = next(following, None), None
            if event is not None and event.action in paired:
                event, other = next(following), event
            if event is None or event.start > middle:
                line.append("·", style="dim")
                continue
            action = event.action if other is None or index % 2 else other.action
            kind, chunk = action.kind, placement.chunk_of(action.stage)
            style = Style(color=ink(chunk), bgcolor=colour(parts(kind)[-1], chunk))
            line.append(str(kind), style=style)
        return line


def _columns(makespan: float, column: float, most: int = 1) -> int:
    """Return how many columns, or bands of ``most`` columns, a timeline takes."""
    count = round(makespan / column + 0.499)
    return -(-count // most)


def schedule_table(rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of (name, summary, placement, chunks a rank, source), whose texts are folded to fit."""
    table = Table(show_lines=False)
    table.add_column("schedule", no_wrap=True)
    table.add_column("what it does; source", overflow="fold")
    table.add_column("placement", no_wrap=True)
    table.add_column("chunks\na rank", no_wrap=True)
    for name, summary, shape, chunks, source in rows:
        table.add_row(name, f"{summary} ({source})" if source else summary, shape, chunks)
    return table


@dataclass
class Numbers:
    """A table to print with rich: a name and numbers in each row.

    Where the console is too narrow for it, several tables have some of the numbers each, and all the names.
    Only a name that is longer than ``_NAME`` is folded, and nothing is cut.
    """

    heading: str
    headings: Sequence[str]
    title: str | None = None
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, name: str, *numbers: str) -> None:
        """Add a row, with a number below each of the headings."""
        self.rows.append((name, *numbers))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, title = 1, self.title
        while first <= len(self.headings):
            end = len(self.headings) + 1
            while end > first + 1 and self._least(console, options, first, end) > options.max_width:
                end -= 1
            yield self._table(first, end, title)
            first, title = end, None

    def _least(self, console: Console, options: ConsoleOptions, first: int, end: int) -> int:
        """Return the least width in columns of the table of the numbers from ``first`` to ``end``."""
        table = self._table(first, end)
        table.columns[0].max_width = table.columns[0].min_width
        return Measurement.get(console, options.update_width(_UNLIMITED), table).maximum

    def _table(self, first: int, end: int, title: str | None = None) -> Table:
        table = Table(title=title, title_justify="left")
        longest = max(map(len, [self.heading, *(name for name, *_ in self.rows)]))
        table.add_column(self.heading, overflow="fold", min_width=min(longest, _NAME))
        for heading in self.headings[first - 1 : end - 1]:
            table.add_column(heading, justify="right", no_wrap=True)
        for name, *numbers in self.rows:
            table.add_row(name, *numbers[first - 1 : end - 1])
        return table


def summary_table(timelines: Mapping[str, Timeline], *, with_messages: bool = True) -> Numbers:
    """Return a row for each schedule: makespan, longest span, both bubbles, and the fullest rank's memory.

    Memory is in whole microbatches' activations (``Timeline.peak_microbatches``), so that schedules with
    different numbers of chunks compare.  Messages are counted in buffers; recorded steps do not have them.
    """
    headings = ["makespan", "bubble", "longest\nspan", "bubble\nin span", "peak\nmemory"]
    table = Numbers("schedule", [*headings, *(["peak\nmessages"] if with_messages else [])])
    for name, timeline in timelines.items():
        table.add_row(
            name,
            f"{timeline.makespan:.5g}",
            f"{timeline.bubble:.1%}",
            f"{timeline.span:.5g}",
            f"{timeline.bubble_span:.1%}",
            f"{max(timeline.peak_microbatches):.4g}",
            *([str(max(timeline.peak_messages))] if with_messages else []),
        )
    return table


def recorded_tables(title: str, step: RecordedStep) -> Iterator[Numbers]:
    """Yield three tables with a row for each rank: its idle time, the causes of it, and its memory.

    Idle times of a step in seconds are in milliseconds.
    """
    start, end = extent(step)
    scale, unit = (1e3, " ms") if step.units.time == SECONDS.time else (1.0, "")

    def shown(time: float) -> str:
        return f"{scale * time:,.2f}"

    headings = ["idle", "share", "warm-up", "in between", "cool-down", "reductions"]
    idle = Numbers("rank", headings, f"{title}: a step of {shown(end - start)}{unit}, idle time")
    clocks = ["clock\nerror"] if any(record.clock_error for record in step.records) else []
    headings = ["in between", "unfinished\nstages", "late\nmessages", "overhead", *clocks]
    waits = Numbers("rank", headings, "What it waited for in between")
    for rank, (causes, record) in enumerate(zip(idle_times(step), step.records, strict=True)):
        between = causes.unfinished_stages, causes.late_messages, causes.overhead
        share = f"{sum(causes) / (end - start):.1%}"
        parts = causes.warm_up, sum(between), causes.cool_down, causes.reductions
        idle.add_row(str(rank), shown(sum(causes)), share, *map(shown, parts))
        error = [record.clock_error] if clocks else []
        waits.add_row(str(rank), *map(shown, (sum(between), *between, *error)))
    yield idle
    yield waits

    on_device = any(record.device_bytes for record in step.records)
    unit = step.units.memory
    whole = [f"all that its device held,\n{unit}"] if on_device else []
    memory = Numbers("rank", [f"live activations,\n{unit}", *whole], "Peak memory")
    form = ",.0f" if unit == SECONDS.memory else ",.4g"
    for rank, record in enumerate(step.records):
        device = [f"{record.device_bytes or 0:,}"] if on_device else []
        memory.add_row(str(rank), f"{record.peak_bytes:{form}}", *device)
    yield memory
