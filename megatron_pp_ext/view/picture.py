"""Schedules as a picture: time to the right, a row a rank, a panel a schedule.

All panels share the time axis, so that the shorter schedule is the shorter picture.  The strip
on the right shows how many microbatches each rank keeps at most.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.simulate import Timeline
from megatron_pp_ext.view.colours import colour, ink, parts

_SUFFIXES = (".svg", ".png", ".pdf")

# Inches.
_COLUMN = 0.14
_NARROWEST, _WIDEST = 10.0, 30.0
_ROW = 0.27
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.75, 0.25, 0.25, 0.55
_HEAD = 0.5
_STRIP, _GAP = 1.3, 0.15

# Points, of 72 an inch.
_LARGEST_FONT, _SMALLEST_FONT = 7.5, 4.5
_DIGIT = 0.66
"""The width of a digit in units of its font size; a number needs 0.4 digits of air besides."""

_IDLE = "#eef0f2"
_GREY = "#5a646e"


def draw(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Draw one panel for each of ``timelines``, titled with its key, into ``path``.

    The suffix chooses the format: .svg, .png or .pdf.  Raises ValueError for any other and when
    there is nothing to draw.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"{path} is no picture file: end its name in one of {', '.join(_SUFFIXES)}")
    if not timelines:
        raise ValueError("no timelines to draw: give at least one")
    makespan = max(timeline.makespan for timeline in timelines.values())
    memory = max(max(timeline.peak_microbatches) for timeline in timelines.values())
    action = _typical_action(timelines)
    width = min(max(_LEFT + makespan / action * _COLUMN + _GAP + _STRIP + _RIGHT, _NARROWEST), _WIDEST)
    height = _TOP + sum(_HEAD + _ROW * len(line.events) for line in timelines.values()) + _BOTTOM
    time_width = width - _LEFT - _GAP - _STRIP - _RIGHT
    scale = 72 * time_width / makespan

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    bottom = height - _TOP
    for title, timeline in timelines.items():
        rows = _ROW * len(timeline.events)
        bottom -= _HEAD + rows
        place = bottom / height, rows / height
        panel = figure.add_axes((_LEFT / width, place[0], time_width / width, place[1]))
        panel.set_xlim(0, makespan)
        _rank_axis(panel, len(timeline.events))
        _draw_actions(panel, timeline, scale, font=min(_LARGEST_FONT, action * scale / (2.4 * _DIGIT)))
        _write_head(panel, title, timeline)
        strip = figure.add_axes((1 - (_STRIP + _RIGHT) / width, place[0], _STRIP / width, place[1]))
        strip.set_xlim(0, memory * 1.25 or 1)
        _draw_memory(strip, timeline)
    panel.tick_params(labelbottom=True)
    panel.set_xlabel("time", fontsize=9, color=_GREY)
    strip.set_xlabel("microbatches kept", fontsize=9, color=_GREY)
    figure.legend(
        handles=_legend(timelines), loc="upper left", bbox_to_anchor=(_LEFT / width, 1.0), ncols=9,
        frameon=False, fontsize=9, borderaxespad=0.3, handlelength=1.4, borderpad=0.2, columnspacing=1.6,
    )  # fmt: skip
    figure.savefig(path, dpi=150)


def _typical_action(timelines: Mapping[str, Timeline]) -> float:
    """How long a forward takes in the schedule with the shortest: what a column is measured by."""
    return min(
        median(
            end - start
            for events in timeline.events
            for action, start, end in events
            if action.kind is Kind.F
        )
        for timeline in timelines.values()
    )


def _rank_axis(axes: Axes, ranks: int) -> None:
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    axes.tick_params(length=0, labelbottom=False, labelsize=8, colors=_GREY)
    axes.set_facecolor(_IDLE)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_actions(axes: Axes, timeline: Timeline, scale: float, font: float) -> None:
    """A box an action, the microbatch's number in it where the number fits; ``scale`` is points a time."""
    placement = timeline.schedule.placement
    boxes: list[Rectangle] = []
    edges: list[list[tuple[float, float]]] = []
    for rank, events in enumerate(timeline.events):
        for (stage, kind, microbatch), start, end in events:
            chunk = placement.chunk_of(stage)
            left = start - timeline.start
            width = (end - start) / len(parts(kind))
            for index, part in enumerate(parts(kind)):
                corner = left + index * width, rank - 0.46
                boxes.append(Rectangle(corner, width, 0.92, facecolor=colour(part, chunk)))
            label = str(microbatch)
            if font >= _SMALLEST_FONT and (len(label) + 0.4) * font * _DIGIT <= (end - start) * scale:
                centre = left + (end - start) / 2
                axes.text(
                    centre, rank, label, fontsize=font, color=ink(chunk), ha="center", va="center_baseline"
                )
            if scale * (end - start) > 3:
                edges.append([(left, rank - 0.46), (left, rank + 0.46)])
    axes.add_collection(PatchCollection(boxes, match_original=True, linewidth=0, zorder=1))
    axes.add_collection(LineCollection(edges, colors="white", linewidths=0.5, zorder=2))


def _write_head(axes: Axes, title: str, timeline: Timeline) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=5)
    numbers = (
        f"makespan {timeline.makespan:.5g}   longest span {timeline.span:.5g}   bubble {timeline.bubble:.1%}"
    )
    axes.set_title(numbers, loc="right", fontsize=9, color=_GREY, pad=5)


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    """The strip beside a panel: a bar a rank, and the number it stands for."""
    peaks = timeline.peak_microbatches
    _rank_axis(axes, len(peaks))
    axes.set_yticks([])
    axes.set_xticks([])
    axes.barh(range(len(peaks)), peaks, height=0.62, color="#b7a5cc")
    for rank, peak in enumerate(peaks):
        axes.text(peak, rank, f" {peak:.4g}", fontsize=7.5, color=_GREY, va="center_baseline")


def _legend(timelines: Mapping[str, Timeline]) -> list[Patch]:
    """The colours that occur, a line a kind and chunk."""
    names = {Kind.F: "F forward", Kind.I: "I input gradient", Kind.W: "W weight gradient"}
    chunks = max(timeline.schedule.placement.chunks for timeline in timelines.values())
    drawn = {
        part for timeline in timelines.values() for action in timeline.schedule for part in parts(action.kind)
    }
    return [
        Patch(facecolor=colour(kind, chunk), label=name if chunk == 0 else f"{kind} of chunk {chunk}")
        for chunk in range(chunks)
        for kind, name in names.items()
        if kind in drawn
    ]
