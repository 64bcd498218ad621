"""Critical paths of a pipeline, which bound its makespan under every other cut.

A replay of the schedule gives its makespan and its critical path.  The same actions wait for each other under
any cut, so that no makespan is below the path's seconds with that cut's stages.  The work of a rank in all
microbatches is such a path as well.  Only a move that shortens every path known so far is worth a replay, and
each replay adds a path, so that a few replays go through all moves.  This is Kelley's method of cutting
planes (1960) for the makespan, which is convex in the seconds of the stages, with one move at a time in place
of a linear program.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.planner.layout.cut import Array, Cut, Moves
from megatron_pp_ext.schedule.loops import Loop
from megatron_pp_ext.schedule.timing import CriticalPath

_PATHS = 24
"""The paths that are kept with those of the ranks; older ones seldom bound a move from where the cut is."""

Floats = NDArray[np.float64]


class CriticalPaths:
    """The paths that are known: how often each has the work of each stage, and its other seconds.

    ``ranks`` are the paths of the ranks' own work: ranks x stages x 4.
    """

    def __init__(self, ranks: Array, moves: Moves) -> None:
        self._ranks, self._work, self._moves = ranks, ranks, moves
        self._others = np.zeros(len(ranks))

    def add(self, path: CriticalPath, seconds: Array) -> float:
        """Add ``path``, found with ``seconds`` of the stages, and return its makespan."""
        work = np.array(path.work, dtype=float)
        constant = path.makespan - float((work * seconds).sum())
        keep = len(self._ranks)
        older = slice(max(keep, len(self._work) - _PATHS + 1), None)
        self._work = np.concatenate([self._ranks, self._work[older], work[None]])
        self._others = np.concatenate([self._others[:keep], self._others[older], [constant]])
        return path.makespan

    def after_moves(self, cut: Cut, seconds: Array) -> Array:
        """Return a lower bound of the makespan after each move: source x target, infinite for none.

        ``seconds`` are those of the stages of ``cut``.
        """
        now = np.einsum("psk,sk->p", self._work, seconds) + self._others
        after = longest(now, *self._moves.by_stage(self._work, cut))
        after[self._moves.impossible(cut)] = np.inf
        return after


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
    after = np.full((stages, stages), -np.inf)
    for path in range(paths):
        for source in range(stages):
            for target in range(stages):
                if source < target:
                    change = given_onwards[path, source] + taken_onwards[path, target]
                else:
                    change = given_backwards[path, source] + taken_backwards[path, target]
                after[source, target] = max(after[source, target], now[path] + change)
    return after
