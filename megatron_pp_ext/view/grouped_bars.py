"""A picture of numbers in groups: a group of bars for each row, a colour for each column."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_pp_ext.view.figure import GREY, hide_frame, new_figure, require_picture, save

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
