"""The loop over all moves of an item and all known paths of a pipeline, which numba compiles."""

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.schedule.loops import Loop

Floats = NDArray[np.float64]


@Loop
def longest(
    now: Floats,
    given_onwards: Floats,
    taken_onwards: Floats,
    given_backwards: Floats,
    taken_backwards: Floats,
) -> Floats:
    """Return the longest path after each move (source x target), of paths that now take ``now`` seconds.

    The others are those of ``cut.Moved``.
    """
    paths, stages = given_onwards.shape
    found = np.full((stages, stages), -np.inf)
    for path in range(paths):
        for source in range(stages):
            for target in range(stages):
                if source < target:
                    change = given_onwards[path, source] + taken_onwards[path, target]
                else:
                    change = given_backwards[path, source] + taken_backwards[path, target]
                found[source, target] = max(found[source, target], now[path] + change)
    return found
