"""Names next to points, each where it covers nothing and nothing cuts it."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from matplotlib.transforms import Bbox

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
