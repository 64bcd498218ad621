"""Schedules for the terminal: a sketch of one, and a table that compares several."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.style import Style
from rich.table import Table
from rich.text import Text

from megatron_pp_ext.schedule.idle_time import Idle, extent, idle_times
from megatron_pp_ext.schedule.recorded import RecordedStep
from megatron_pp_ext.schedule.simulate import Timeline
from megatron_pp_ext.view.colours import colour, ink, parts


@dataclass(frozen=True, slots=True)
class Sketch:
    """A timeline to print with rich: one line of coloured letters for each rank, within the console's width.

    A column is as long as the shortest action, or longer where the timeline would not fit; it shows what the
    rank does in the middle of it.  Chunks after the first have darker colours.
    """

    timeline: Timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one Text for each rank, then the scale."""
        gutter = len(str(len(self.timeline.events) - 1)) + 1
        columns = max(options.max_width - gutter, 1)
        unit = min(end - start for events in self.timeline.events for _, start, end in events)
        column = max(unit, self.timeline.makespan / columns)
        for rank, line in enumerate(self._lines(column)):
            yield Text(no_wrap=True).append(f"{rank:>{gutter - 1}} ", style="dim").append_text(line)
        yield Text(
            f"{'':{gutter}}1 column = {column:.4g}, makespan {self.timeline.makespan:.5g}", style="dim"
        )

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the least and the most columns that a sketch may have."""
        return Measurement(20, options.max_width)

    def _lines(self, column: float) -> Iterator[Text]:
        placement = self.timeline.schedule.placement
        columns = round(self.timeline.makespan / column + 0.499)
        for events in self.timeline.events:
            line = Text(no_wrap=True)
            following = iter(events)
            event = next(following, None)
            for index in range(columns):
                middle = self.timeline.start + (index + 0.5) * column
                while event is not None and event.end <= middle:
                    event = next(following, None)
                if event is None or event.start > middle:
                    line.append("·", style="dim")
                    continue
                kind, chunk = event.action.kind, placement.chunk_of(event.action.stage)
                style = Style(color=ink(chunk), bgcolor=colour(parts(kind)[-1], chunk))
                line.append(str(kind), style=style)
            yield line


def summary_table(timelines: Mapping[str, Timeline], *, with_messages: bool = True) -> Table:
    """Return a row for each schedule: makespan, longest span, both bubbles, and the fullest rank's memory.

    Activations are in whole microbatches (``Timeline.peak_microbatches``), so that schedules with
    different numbers of chunks compare.  Messages are counted in buffers; recorded steps do not have them.
    """
    table = Table()
    table.add_column("schedule", no_wrap=True)
    headings = ["makespan", "bubble", "longest span", "bubble in span", "peak microbatches"]
    for heading in (*headings, "peak messages") if with_messages else headings:
        table.add_column(heading, justify="right")
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


def idle_table(step: RecordedStep) -> Table:
    """Return a row for each rank: its idle time in the step and the share of each cause, in milliseconds."""
    start, end = extent(step)
    idle = idle_times(step)
    table = Table(title=f"{step.name}: a step of {1e3 * (end - start):,.2f} ms", title_justify="left")
    headings = ["rank", "idle", "", *(cause.replace("_", " ") for cause in Idle._fields)]
    if any(record.clock_error for record in step.records):
        headings.append("clock error")
    for heading in headings:
        table.add_column(heading, justify="right")
    for rank, (causes, record) in enumerate(zip(idle, step.records, strict=True)):
        cells = [f"{1e3 * seconds:.2f}" for seconds in (*causes, record.clock_error)]
        share = f"{sum(causes) / (end - start):.1%}"
        table.add_row(str(rank), f"{1e3 * sum(causes):.2f}", share, *cells[: len(headings) - 3])
    return table
