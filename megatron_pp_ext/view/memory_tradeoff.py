"""Pictures of what memory buys: schedules by step time and configurations by throughput.

Memory of the fullest rank goes to the right.  Single results are points, and the best results for rising
memory are joined by a line of steps.
"""

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from megatron_pp_ext.schedule.simulate import Timeline
from megatron_pp_ext.view.figure import GREY, hide_frame, new_figure, require_picture, save, write_names

_POINTS, _STEPS, _BOUND = "#5b9bd5", "#d9822b", "#b9c0c6"
_FONT = 8.5


class Point(NamedTuple):
    """A configuration: the bytes of its fullest rank, and the tokens a second of all GPUs."""

    name: str
    memory: float
    throughput: float


def draw_schedules(
    timelines: Mapping[str, Timeline],
    compiled: Sequence[Timeline],
    work: float,
    path: str | Path,
    title: str,
    time_unit: str = "",
) -> None:
    """Draw named schedules as points and ``compiled`` ones, by rising memory, as a line of steps.

    Memory is in whole microbatches and the makespan goes upwards, so that the best schedules are low and
    left.  ``work`` is the makespan without any bubble, ``time_unit`` what 1 of it stands for.  Schedules that
    keep more than twice the number of ranks are only named.  The suffix of ``path`` chooses the format;
    ValueError for an unknown one.
    """
    path = Path(path)
    require_picture(path)
    figure = new_figure(9, 5.4)
    axes: Any = figure.add_axes((0.085, 0.11, 0.885, 0.79))
    widest = 2.2 * max(timeline.schedule.ranks for timeline in timelines.values())
    places: dict[tuple[float, float], list[str]] = {}
    beyond = []
    for name, timeline in timelines.items():
        memory = max(timeline.peak_microbatches)
        if memory > widest:
            beyond.append(f"{name} ({memory:.4g} microbatches, {timeline.makespan:.5g})")
        else:
            places.setdefault((round(memory, 6), round(timeline.makespan, 6)), []).append(name)
    slowest = max(time for _, time in places)
    axes.set_xlim(0, 1.12 * max(memory for memory, _ in places))
    axes.set_ylim(work - 0.15 * (slowest - work), slowest + 0.2 * (slowest - work))

    axes.axhline(work, color=_BOUND, linewidth=1, linestyle="--")
    axes.annotate(
        "no bubble", (1, work), xycoords=axes.get_yaxis_transform(), xytext=(-4, -10),
        textcoords="offset points", ha="right", fontsize=8, color=GREY,
    )  # fmt: skip
    if compiled:
        memories = [max(timeline.peak_microbatches) for timeline in compiled]
        times = [timeline.makespan for timeline in compiled]
        _, points = _draw_steps(axes, memories, times, 2 * widest, marker=4)
        points.set_label("flex, compiled for a limit")
    axes.scatter(*zip(*places, strict=True), s=42, color=_POINTS, zorder=4, label="by name")
    _label(
        axes,
        "activations of the fullest rank, in microbatches",
        f"makespan ({time_unit})" if time_unit else "makespan",
        title,
    )
    if beyond:
        axes.set_title(f"further right: {', '.join(beyond)}", loc="right", fontsize=8, color=GREY)
    if compiled:
        axes.legend(frameon=False, fontsize=9, loc="upper right")
    write_names(axes, {place: ", ".join(names) for place, names in places.items()}, _FONT, "black")
    save(figure, path)


def draw_configurations(
    best: Sequence[Point], frontier: Sequence[Point], limit: float, path: Path, title: str
) -> None:
    """Draw ``best`` as points and ``frontier``, by rising memory, as a line of steps up to ``limit`` bytes.

    Where a point is in both, its name is that on the frontier, if it has one there.

    The suffix of ``path`` chooses the format; ValueError for an unknown one.
    """
    require_picture(path)
    save(_configurations(best, frontier, limit, title), path)


def configurations_svg(best: Sequence[Point], frontier: Sequence[Point], limit: float, title: str) -> str:
    """Return the picture of ``draw_configurations`` as SVG to put into a page."""
    text = StringIO()
    _configurations(best, frontier, limit, title).savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def _configurations(best: Sequence[Point], frontier: Sequence[Point], limit: float, title: str) -> Figure:
    figure = new_figure(9, 5)
    axes: Any = figure.add_axes((0.1, 0.12, 0.86, 0.75))
    memories = [point.memory / 1e9 for point in frontier]
    rates = [point.throughput for point in frontier]
    line, _ = _draw_steps(axes, memories, rates, limit / 1e9, marker=5)
    line.set_label("most throughput within a memory")
    axes.scatter(
        [point.memory / 1e9 for point in best], [point.throughput for point in best], s=36, color=_POINTS,
        zorder=4, label="the best", gid="points",
    )  # fmt: skip
    axes.axvline(limit / 1e9, color=GREY, linewidth=1, linestyle="--", gid="limit")
    axes.set_xlim(0, 1.15 * limit / 1e9)
    axes.margins(y=0.12)
    _label(axes, "memory of the fullest rank, GB", "tokens a second", title, above=26)  # above the legend
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=2).set_gid(
        "legend"
    )
    named = [*best, *(point for point in frontier if point.name)]
    names = {(point.memory / 1e9, point.throughput): point.name for point in named}
    write_names(axes, names, 8, GREY)
    return figure


def _draw_steps(
    axes: Any, memories: Sequence[float], values: Sequence[float], until: float, marker: float
) -> tuple[Line2D, Line2D]:
    """Join the best results for rising ``memories``: a result for some memory is one for more as well."""
    turns = [memory for memory in [*memories, until] for _ in range(2)][1:-1]
    levels = [value for value in values for _ in range(2)]
    (line,) = axes.plot(turns, levels, color=_STEPS, linewidth=1.6, zorder=2)
    (points,) = axes.plot(memories, values, "o", color=_STEPS, markersize=marker, zorder=3)
    return line, points


def _label(axes: Any, across: str, upwards: str, title: str, above: float = 6) -> None:
    axes.set_xlabel(across, color=GREY)
    axes.set_ylabel(upwards, color=GREY)
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11, pad=above, parse_math=False)
    axes.grid(color="#e6e9ec", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=GREY)
    hide_frame(axes)
