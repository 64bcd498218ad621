"""The colours of the papers' figures, for pictures and the terminal alike."""

from colorsys import hls_to_rgb, rgb_to_hls
from functools import cache

from megatron_pp_ext.schedule.actions import Kind

_HUES = {Kind.F: "#5b9bd5", Kind.I: "#5fc8c8", Kind.W: "#7fb858", Kind.S: "#e0a24a", Kind.T: "#c9c04d"}

NAMES = {
    Kind.F: "F forward",
    Kind.I: "I input gradient",
    Kind.W: "W weight gradient",
    Kind.S: "S part of the logits",
    Kind.T: "T its weight gradient",
}
"""The kinds as a legend has them."""

COPIES = {"out": "#c0504d", "back": "#d99694"}
"""The colours of copies to the host and back: dark and light red."""

_DARKER = 0.72
"""The ratio of the lightness of one chunk to the chunk before."""


def parts(kind: Kind) -> tuple[Kind, ...]:
    """Return the kinds whose colours an action shows: a whole backward is an I and a W in one."""
    return (Kind.I, Kind.W) if kind is Kind.B else (kind,)


@cache
def colour(kind: Kind, chunk: int) -> str:
    """Return blue for F, teal for I, green for W, orange for S, yellow for T, as ``#rrggbb``.

    Each further chunk has a darker shade.
    """
    code = _HUES[kind]
    red, green, blue = (int(code[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, lightness, saturation = rgb_to_hls(red, green, blue)
    shaded = hls_to_rgb(hue, lightness * _DARKER**chunk, saturation)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in shaded)


def ink(chunk: int) -> str:
    """Return the colour of text on ``colour(..., chunk)``."""
    return "#ffffff" if chunk else "#10222e"
