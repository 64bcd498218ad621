"""Schedules as a picture: time to the right, one row for each rank, one panel for each schedule."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patches import Patch

from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.simulate import Timeline
from megatron_pp_ext.view.colours import COPIES, NAMES, colour, ink, parts
from megatron_pp_ext.view.figure import GREY, hide_frame, new_figure, require_picture, save, write_labels

POINTS = 72
"""The points that an inch has in matplotlib's SVG."""


def of_actions(
    timeline: Timeline, left: float, top: float, width: float, row: float, height: float
) -> Iterator[str]:
    """Yield an invisible box for every action; all sizes are in inches, from the picture's upper left corner.

    ``width`` is of a unit of time, ``row`` the distance of two ranks and ``height`` of an action.
    """
    for rank, events in enumerate(timeline.events):
        for action, start, end in events:
            begin = start - timeline.start
            x, y = POINTS * (left + begin * width), POINTS * (top + rank * row)
            about = f"{action} on rank {rank}: {begin:.5g} to {end - timeline.start:.5g}"
            yield (
                f'<rect x="{x:.2f}" y="{y:.2f}" width="{POINTS * (end - start) * width:.2f}" '
                f'height="{POINTS * height:.2f}"><title>{about}</title></rect>\n'
            )


def grouped(boxes: list[str]) -> str:
    """Return ``boxes`` as the part of an SVG that lies above all others and is not seen."""
    return f'<g id="tooltips" fill="none" pointer-events="all">\n{"".join(boxes)}</g>\n'


# Inches.
_COLUMN = 0.14
_NARROWEST, _WIDEST = 10.0, 30.0
_ROW = 0.5
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.75, 0.75, 0.25, 0.55
_HEAD = 0.62

# Fractions of a row's height: where the actions end, where the memory curve begins and ends, and where copies
# are drawn, below which the curve then stays.
_ACTIONS, _FLOOR, _CEILING = 0.53, 0.93, 0.57
_COPY_ROWS = {"out": (0.545, 0.6), "back": (0.605, 0.66)}
_BELOW_COPIES = 0.69

# Points, of 72 an inch.
_LARGEST_FONT, _SMALLEST_FONT = 7.5, 4.5
_DIGIT = 0.66
"""The width of a digit in units of its font size; a number needs a margin of 0.4 digits more."""

_IDLE = "#eef0f2"
_MEMORY, _MEMORY_EDGE = "#d9cfe6", "#8e78ad"

MOST_RANKS, MOST_ACTIONS = 256, 200_000
"""The rows and the boxes that a picture can hold: more rows exceed its pixels, and boxes its width."""

_Box = list[tuple[float, float]]


def draw(timelines: Mapping[str, Timeline] | Timeline, path: str | Path, time_unit: str = "") -> None:
    """Draw one panel for each of ``timelines``, titled with its key or its name, into ``path``.

    The suffix chooses the format: .svg, .png or .pdf.  ``time_unit`` is the unit that the label of the time
    axis gives.  Raises ValueError for another suffix, when there is nothing to draw, and for more than fits.

    Panels share the time axis, so that the shorter schedule is the shorter picture.  Under each rank's
    actions is its memory curve: the activations that it keeps at every moment, in whole microbatches, on a
    scale that all panels share too.  The number at the end of a curve is its peak.
    """
    if isinstance(timelines, Timeline):
        timelines = {timelines.schedule.name: timelines}
    draw_groups([timelines], path, time_unit)


def draw_groups(groups: Sequence[Mapping[str, Timeline]], path: str | Path, time_unit: str = "") -> None:
    """Draw like ``draw``, with a time axis of its own for each of ``groups``; all are equally wide."""
    path = Path(path)
    require_picture(path)
    timelines = [timeline for group in groups for timeline in group.values()]
    if not timelines:
        raise ValueError("no timelines to draw: give at least one")
    orders = [events for timeline in timelines for events in timeline.events]
    require_fit(len(orders), sum(map(len, orders)))
    memory = max(max(timeline.peak_microbatches) for timeline in timelines)
    columns = max(_makespan(group) / _typical_action(group) for group in groups)
    width = min(max(_LEFT + columns * _COLUMN + _RIGHT, _NARROWEST), _WIDEST)
    panels = sum(_HEAD + _ROW * len(timeline.events) for timeline in timelines)
    height = _TOP + panels + _BOTTOM * len(groups)
    time_width = width - _LEFT - _RIGHT

    figure = new_figure(width, height)
    bottom, hints = height - _TOP, list[str]()
    for group in groups:
        makespan = _makespan(group)
        scale = 72 * time_width / makespan
        font = min(_LARGEST_FONT, _typical_action(group) * scale / (2.4 * _DIGIT))
        for title, timeline in group.items():
            rows = _ROW * len(timeline.events)
            bottom -= _HEAD + rows
            panel = figure.add_axes((_LEFT / width, bottom / height, time_width / width, rows / height))
            panel.set_xlim(0, makespan)
            _rank_axis(panel, len(timeline.events))
            _draw_actions(panel, timeline, scale, font)
            _draw_memory(panel, timeline, memory)
            _draw_copies(panel, timeline)
            _write_head(panel, title, timeline)
            top, unit = height - bottom - rows, time_width / makespan
            hints += of_actions(timeline, _LEFT, top, unit, _ROW, _ACTIONS * _ROW)
        panel.tick_params(labelbottom=True)
        panel.set_xlabel(f"time ({time_unit})" if time_unit else "time", fontsize=9, color=GREY)
        bottom -= _BOTTOM
    figure.legend(
        handles=_legend(timelines), loc="upper left", bbox_to_anchor=(_LEFT / width, 1.0), ncols=12,
        frameon=False, fontsize=9, borderaxespad=0.3, handlelength=1.4, borderpad=0.2, columnspacing=1.6,
    )  # fmt: skip
    save(figure, path, grouped(hints))


def require_fit(ranks: int, actions: int) -> None:
    """Raise ValueError unless a picture can hold ``ranks`` rows and ``actions`` boxes in all its panels."""
    if ranks > MOST_RANKS or actions > MOST_ACTIONS:
        raise ValueError(
            f"{ranks:,} ranks with {actions:,} actions do not fit into a picture, which has room for "
            f"{MOST_RANKS} and {MOST_ACTIONS:,}: draw fewer ranks or microbatches, or leave the picture out"
        )


def _makespan(timelines: Mapping[str, Timeline]) -> float:
    return max(timeline.makespan for timeline in timelines.values())


def _typical_action(timelines: Mapping[str, Timeline]) -> float:
    """Return the shortest median time of a forward among ``timelines``, which sets the width of a column."""
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
    axes.set_ylim(ranks, 0)
    axes.set_yticks(
        [rank + _ACTIONS / 2 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)], fontsize=8
    )
    axes.tick_params(length=0, labelbottom=False, labelsize=8, colors=GREY)
    hide_frame(axes)


def _draw_actions(axes: Axes, timeline: Timeline, scale: float, font: float) -> None:
    """Draw a box for each action, with its microbatch if that fits; ``scale`` is points per unit of time."""
    placement = timeline.schedule.placement
    boxes: dict[str, list[_Box]] = defaultdict(list)
    labels: dict[tuple[str, str], _Box] = defaultdict(list)
    edges: list[_Box] = []
    paired = timeline.schedule.paired
    for rank, events in enumerate(timeline.events):
        boxes[_IDLE].append(_box(0, timeline.makespan, rank))
        is_second = False
        for action, start, end in events:
            stage, kind, microbatch = action
            # The forward of a pair is drawn above its backward.
            top, bottom = 0.5 * is_second, 1 - 0.5 * (action in paired)
            is_second = action in paired
            chunk = placement.chunk_of(stage)
            left = start - timeline.start
            width = (end - start) / len(parts(kind))
            for index, part in enumerate(parts(kind)):
                corner = left + index * width
                boxes[colour(part, chunk)].append(_box(corner, corner + width, rank, top, bottom))
            label = timeline.schedule.unit_name(microbatch)
            if font >= _SMALLEST_FONT and (len(label) + 0.4) * font * _DIGIT <= (end - start) * scale:
                centre = left + (end - start) / 2, rank + _ACTIONS * (top + bottom) / 2
                labels[label, ink(chunk)].append(centre)
            if scale * (end - start) > 3:
                edges.append([(left, rank), (left, rank + _ACTIONS)])
    for fill, shapes in boxes.items():
        axes.add_collection(PolyCollection(shapes, facecolors=fill, linewidths=0, zorder=1), autolim=False)
    axes.add_collection(LineCollection(edges, colors="white", linewidths=0.5, zorder=2), autolim=False)
    for (label, text_colour), places in labels.items():
        write_labels(axes, label, places, font, text_colour)


def _box(left: float, right: float, rank: int, top: float = 0.0, bottom: float = 1.0) -> _Box:
    above, below = rank + _ACTIONS * top, rank + _ACTIONS * bottom
    return [(left, above), (right, above), (right, below), (left, below)]


def _draw_copies(axes: Axes, timeline: Timeline) -> None:
    """Draw the copies of each rank below its actions, to the host above those back."""
    for way, (top, bottom) in _COPY_ROWS.items():
        boxes = [
            [(left, rank + top), (right, rank + top), (right, rank + bottom), (left, rank + bottom)]
            for rank, copies in enumerate(timeline.copies)
            for left, right in ((time - timeline.start for time in getattr(copied, way)) for copied in copies)
        ]
        collection = PolyCollection(
            boxes, facecolors=COPIES[way], edgecolors="white", linewidths=0.3, zorder=3
        )
        axes.add_collection(collection, autolim=False)


def _draw_memory(axes: Axes, timeline: Timeline, most: float) -> None:
    """Draw the activations of each rank under its actions; ``most`` microbatches fill the height."""
    ceiling = _BELOW_COPIES if timeline.copies else _CEILING
    areas: list[_Box] = []
    curves: list[_Box] = []
    for rank, peak in enumerate(timeline.peak_microbatches):
        highest = timeline.peak_activations[rank]
        height = (_FLOOR - ceiling) * peak / (highest * most) if highest else 0.0
        floor = rank + _FLOOR
        # Where several values fall on one moment only the last counts: the others would be spikes.
        steps = {time - timeline.start: floor - live * height for time, live in timeline.memory(rank)}
        curve = [(0.0, floor)]
        for time, level in (*steps.items(), (timeline.makespan, floor)):
            curve += [(time, curve[-1][1]), (time, level)]
        areas.append([*curve, (timeline.makespan, floor)])
        curves.append(curve)
        axes.annotate(
            f"{peak:.4g}", (timeline.makespan, rank + (ceiling + _FLOOR) / 2), xytext=(5, 0),
            textcoords="offset points", fontsize=8, color=_MEMORY_EDGE, va="center", annotation_clip=False,
        )  # fmt: skip
    axes.add_collection(PolyCollection(areas, facecolors=_MEMORY, linewidths=0, zorder=1), autolim=False)
    axes.add_collection(LineCollection(curves, colors=_MEMORY_EDGE, linewidths=0.8, zorder=2), autolim=False)


def _write_head(axes: Axes, title: str, timeline: Timeline) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=18, parse_math=False)
    schedule = timeline.schedule
    numbers = (
        f"{schedule.ranks} ranks, {schedule.whole_microbatches} microbatches"
        + (f" in {schedule.microbatches} units" if schedule.units else ""),
        f"makespan {timeline.makespan:.5g}",
        f"longest span {timeline.span:.5g}",
        f"bubble {timeline.bubble:.1%}",
    )
    axes.annotate(
        "   ".join(numbers), (0, 1), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points",
        fontsize=9, color=GREY,
    )  # fmt: skip


def _legend(timelines: Sequence[Timeline]) -> list[Patch]:
    """Return entries for the kinds that occur, the shades of further chunks, and the memory curve."""
    chunks = max(timeline.schedule.placement.chunks for timeline in timelines)
    present = {part for timeline in timelines for action in timeline.schedule for part in parts(action.kind)}
    kinds = [Patch(facecolor=colour(kind, 0), label=name) for kind, name in NAMES.items() if kind in present]
    shades = [
        Patch(facecolor=colour(Kind.F, chunk), label=f"darker: chunk {chunk}") for chunk in range(1, chunks)
    ]
    memory = Patch(facecolor=_MEMORY, edgecolor=_MEMORY_EDGE, label="activations kept, in microbatches")
    ways = {"out": "copy to the host", "back": "copy back"}
    copies = [Patch(facecolor=COPIES[way], label=label) for way, label in ways.items()]
    return [*kinds, *shades, *(copies if any(timeline.copies for timeline in timelines) else []), memory]
