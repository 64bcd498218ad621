"""Schedules as points: memory to the right, step time upwards, so that the best are low and left."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from megatron_pp_ext.schedule.simulate import Timeline
from megatron_pp_ext.view.figure import GREY, new_figure, require_picture, save

_NAMED, _COMPILED, _BOUND = "#5b9bd5", "#d9822b", "#b9c0c6"
_FONT = 8.5


def draw(
    timelines: Mapping[str, Timeline],
    compiled: Sequence[Timeline],
    work: float,
    path: str | Path,
    title: str,
) -> None:
    """Draw named schedules as points and ``compiled`` ones, by rising memory, as a line of steps.

    Memory is that of the fullest rank in whole microbatches; ``work`` is the time in which no
    schedule has a bubble.  Schedules that keep more than twice the number of ranks are only named.
    The suffix of ``path`` chooses the format; ValueError for an unknown one.
    """
    path = Path(path)
    require_picture(path)
    figure = new_figure(9, 5.4)
    axes = figure.add_axes((0.085, 0.11, 0.885, 0.79))
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
        # Whatever fits into some memory fits into more.
        axes.step(
            [*memories, 2 * widest],
            [*times, times[-1]],
            where="post",
            color=_COMPILED,
            linewidth=1.6,
            zorder=2,
        )
        label = "flex, compiled for a limit"
        axes.plot(memories, times, "o", color=_COMPILED, markersize=4, label=label, zorder=3)
    memory_of, time_of = zip(*places, strict=True)
    axes.scatter(memory_of, time_of, s=42, color=_NAMED, zorder=4, label="by name")
    _name(axes, places)
    axes.set_xlabel("activations of the fullest rank, in microbatches", color=GREY)
    axes.set_ylabel("makespan", color=GREY)
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    if beyond:
        axes.set_title(f"further right: {', '.join(beyond)}", loc="right", fontsize=8, color=GREY)
    axes.grid(color="#e6e9ec", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=GREY)
    for side in axes.spines.values():
        side.set_visible(False)
    if compiled:
        axes.legend(frameon=False, fontsize=9, loc="upper right")
    save(figure, path)


def _name(axes: Axes, places: Mapping[tuple[float, float], Sequence[str]]) -> None:
    """Write the names beside their points, each on the first side where it covers nothing."""
    to_points = axes.transData + axes.figure.dpi_scale_trans.inverted()
    taken = []
    for place in places:
        x, y = (72 * value for value in to_points.transform(place))
        taken.append((x - 5, y - 5, x + 5, y + 5))
    for place, names in sorted(places.items(), reverse=True):
        text = ", ".join(names)
        width = 0.56 * _FONT * len(text)
        x, y = (72 * value for value in to_points.transform(place))
        for right, up in ((7, 4), (7, -12), (-7 - width, 4), (-7 - width, -12), (7, 15), (7, -23), (7, 26)):
            box = (x + right, y + up, x + right + width, y + up + _FONT)
            if not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        axes.annotate(text, place, xytext=(right, up), textcoords="offset points", fontsize=_FONT, zorder=5)


def _overlap(box: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
