"""Values between measured points."""

from collections.abc import Sequence
from itertools import pairwise


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at ``at`` between rising ``points``, and that of the first or last outside of them."""
    for (low, before), (high, after) in pairwise(points):
        if at <= high:
            return before + (after - before) * max(0.0, at - low) / (high - low)
    return points[-1][1]
