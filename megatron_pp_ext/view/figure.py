"""The common parts of all pictures: formats, sizes, names next to points, and bars in groups."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D, Bbox

from megatron_pp_ext.files import whole, write_whole

_SIDES = [(right, up) for up in (-12, 4, -23, 15, -34, 26) for right in (7, -7)]
"""Where a name may begin (or end, left of its point), in points to the right and upwards, by preference."""


def write_names(axes: Any, names: Mapping[tuple[float, float], str], size: float, colour: str) -> None:
    """Write each of ``names`` in ``size`` points next to its place, which is in the coordinates of ``axes``.

    All else has to be drawn already, and the limits set: a name keeps clear of points, lines, the legend and
    the names before it, and stays within the figure.  Where no side is free it takes the least covered one.
    """
    renderer = axes.figure.canvas.get_renderer()
    occupied = _drawn(axes, renderer)
    for number, (place, name) in enumerate(sorted(names.items(), reverse=True)):
        label = axes.annotate(
            name, place, xytext=_SIDES[0], textcoords="offset points", fontsize=size, color=colour, zorder=5,
            gid=f"name-{number}",
        )  # fmt: skip

        def covered(side: tuple[float, float], label: Any = label) -> float:
            label.set(position=side, horizontalalignment="left" if side[0] > 0 else "right")
            box = label.get_window_extent(renderer)
            outside = box.width * box.height - _common(box, axes.figure.bbox)
            return sum(_common(box, other) for other in occupied) + outside

        covered(min(_SIDES, key=covered))
        occupied.append(label.get_window_extent(renderer))


def _drawn(axes: Any, renderer: Any) -> list[Bbox]:
    """Return boxes of all elements of ``axes``: each point, each piece of a line, the texts, the legend."""
    pixel = axes.figure.dpi / 72
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    if legend := axes.get_legend():
        boxes.append(legend.get_window_extent(renderer))
    for points in axes.collections:
        radius = pixel * max(points.get_sizes()) ** 0.5 / 2
        boxes += [_around([place], radius) for place in axes.transData.transform(points.get_offsets())]
    for line in axes.lines:
        corners = line.get_transform().transform(line.get_xydata())
        if line.get_linestyle() == "None":
            boxes += [_around([corner], pixel * line.get_markersize() / 2) for corner in corners]
        else:
            boxes += [_around(piece, pixel * line.get_linewidth() / 2) for piece in pairwise(corners)]
    return boxes


def _around(corners: Any, margin: float) -> Bbox:
    return Bbox.null().union([Bbox([corner, corner]) for corner in corners]).padded(margin)


def _common(box: Bbox, other: Bbox) -> float:
    """Return the area, in pixels, that two boxes share."""
    shared = Bbox.intersection(box, other)
    return shared.width * shared.height if shared else 0.0


SUFFIXES = (".svg", ".png", ".pdf")
GREY = "#5a646e"


def require_picture(path: Path) -> None:
    """Raise ValueError unless ``path`` has the suffix of a picture."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} is no picture file: end its name in one of {', '.join(SUFFIXES)}")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of ``width`` x ``height`` inches, without a window."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path, over: str = "") -> None:
    """Write ``figure`` into ``path``; ``over`` are elements that an SVG has above all others."""
    if path.suffix.lower() == ".svg" and over:
        text = StringIO()
        figure.savefig(text, format="svg")
        start, end, rest = text.getvalue().rpartition("</svg>")
        write_whole(path, f"{start}{over}{end}{rest}")
        return
    with whole(path) as unfinished:
        if path.suffix.lower() == ".png":
            # Boxes of one colour compress well at any level, and the default one takes as long as drawing.
            figure.savefig(unfinished, dpi=150, pil_kwargs={"compress_level": 2})
        else:
            figure.savefig(unfinished)


def hide_frame(axes: Axes) -> None:
    """Draw no lines around ``axes``."""
    for side in axes.spines.values():
        side.set_visible(False)


def write_labels(
    axes: Axes, text: str, places: Sequence[tuple[float, float]], size: float, colour: str
) -> None:
    """Write ``text`` at all ``places`` of ``axes``, centred, in ``size`` points.

    The text is one shape drawn many times, since setting thousands of texts one by one takes seconds.
    """
    labels = PathCollection(
        [_outline(text)], offsets=places, offset_transform=axes.transData, facecolors=colour, linewidths=0
    )
    labels.set_transform(Affine2D().scale(size / 72) + axes.figure.dpi_scale_trans)
    labels.set_zorder(3)
    axes.add_collection(labels, autolim=False)


@lru_cache(maxsize=4096)
def _outline(text: str) -> Outline:
    """Return ``text`` as a shape of font size 1 with its middle at the origin."""
    shape = TextPath((0, 0), text, size=100, prop=FontProperties())
    # All digits are centred like 0; with centres of their own they would not stand on one line.
    box, digit = shape.get_extents(), TextPath((0, 0), "0", size=100, prop=FontProperties()).get_extents()
    middle = (box.x0 + box.x1) / 2, (digit.y0 + digit.y1) / 2
    return Affine2D().translate(-middle[0], -middle[1]).scale(1 / 100).transform_path(shape)


_COLOURS = "#b9c0c6", "#8e78ad", "#d9a441", "#d9822b", "#8fbf6a", "#3f8f5b", "#5b9bd5"
_GROUP = 0.84
"""The part of a group's place that its bars fill."""


def draw(rows: Mapping[str, Mapping[str, float]], path: str | Path, label: str, least: float = 0.0) -> None:
    """Draw ``rows`` with bars from ``least`` on; a row may lack some of the columns of others.

    The suffix of ``path`` chooses the format; ValueError for an unknown one.
    """
    path = Path(path)
    require_picture(path)
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    width = _GROUP / len(columns)
    figure = new_figure(max(8.0, 0.35 + 1.15 * len(rows)), 4.6)
    axes: Any = figure.add_axes((0.07, 0.12, 0.92, 0.78))
    for number, column in enumerate(columns):
        places = [at - _GROUP / 2 + (number + 0.5) * width for at in range(len(rows))]
        heights = [row.get(column, least) - least for row in rows.values()]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.bar(places, heights, width, bottom=least, color=colour, label=column)
    axes.set_xticks(range(len(rows)), list(rows), fontsize=9)
    axes.set_ylabel(label, fontsize=9, color=GREY)
    axes.tick_params(length=0, labelsize=9)
    hide_frame(axes)
    axes.grid(axis="y", color="#e3e6e9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9, ncols=len(columns), loc="lower left", bbox_to_anchor=(0, 1.0))
    save(figure, path)
