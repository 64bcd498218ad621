"""The colours of the papers' figures, for picture and terminal alike."""

from colorsys import hls_to_rgb, rgb_to_hls
from functools import cache

from megatron_pp_ext.schedule.actions import Kind

_HUES = {Kind.F: "#5b9bd5", Kind.I: "#5fc8c8", Kind.W: "#7fb858"}

_DARKER = 0.72
"""What is left of the lightness from one chunk to the next."""


def parts(kind: Kind) -> tuple[Kind, ...]:
    """The kinds whose colours an action shows: a whole backward is an I and a W in one."""
    return (Kind.I, Kind.W) if kind is Kind.B else (kind,)


@cache
def colour(kind: Kind, chunk: int) -> str:
    """F blue, I teal, W green as ``#rrggbb``; each further chunk of a rank a darker shade."""
    code = _HUES[kind]
    red, green, blue = (int(code[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, lightness, saturation = rgb_to_hls(red, green, blue)
    shaded = hls_to_rgb(hue, lightness * _DARKER**chunk, saturation)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in shaded)


def ink(chunk: int) -> str:
    """The colour of text on ``colour(..., chunk)``."""
    return "#ffffff" if chunk else "#10222e"
