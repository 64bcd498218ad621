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
    """A timeline as one line of coloured letters a rank; as wide as the console lets it be.

    A column is one time unit, or as much more as it takes to fit; each shows what the rank does
    in the middle of it.  Chunks after the first have darker colours.
    """

    timeline: Timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One Text a rank, then the scale."""
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
        """It fills what it is given."""
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
                letter = str(kind)
                style = Style(color=ink(chunk), bgcolor=colour(parts(kind)[-1], chunk))
                line.append(letter, style=style)
            yield line


def show(timeline: Timeline) -> Sketch:
    """A sketch of ``timeline`` to print with rich."""
    return Sketch(timeline)


def summary_table(timelines: Mapping[str, Timeline], *, with_messages: bool = True) -> Table:
    """A row a schedule: makespan, longest span, bubble against each, and the memory of the fullest rank.

    Activations are in whole microbatches (``Timeline.peak_microbatches``), so that schedules with
    different numbers of chunks compare.  Messages are buffers; a recorded step does not tell them.
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
    """A row a rank: how much of the step it was idle, and by how much each cause made it so, in ms."""
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
