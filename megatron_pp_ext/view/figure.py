"""The common parts of all pictures: file formats, sizes, and text that is quick to draw by the thousand."""

from collections.abc import Sequence
from functools import lru_cache
from io import StringIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from megatron_pp_ext.files import whole, write_whole

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
