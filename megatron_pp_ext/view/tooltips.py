"""Tooltips for pictures as SVG: the name and times of an action, where its box is too small for them."""

from collections.abc import Iterator

from megatron_pp_ext.schedule.simulate import Timeline

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


def group(boxes: list[str]) -> str:
    """Return ``boxes`` as the part of an SVG that lies above all others and is not seen."""
    return f'<g id="tooltips" fill="none" pointer-events="all">\n{"".join(boxes)}</g>\n'
