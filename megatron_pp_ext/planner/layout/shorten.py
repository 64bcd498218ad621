"""Moves items between stages as long as the simulated pipeline gets shorter.

A replay of the schedule gives its makespan and its critical path.  The path bounds every other cut: the same
actions wait for each other there too, so that no makespan is below the path's seconds with that cut's stages.
The work of a rank in all microbatches is such a path as well.  Only a move that shortens every path known so
far is worth a replay, and each replay adds a path, so that a few replays go through all moves.  This is
Kelley's method of cutting planes (1960) for the makespan, which is convex in the seconds of the stages,
with one move at a time in place of a linear program.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megatron_pp_ext.planner.layout.cut import (
    Array,
    Cut,
    Moves,
    Seconds,
    moved,
    times,
    work_of_ranks,
)
from megatron_pp_ext.planner.layout.path_loops import longest
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.timing import CriticalPath

REPLAYS = 48
"""The replays that a cut is improved with at most."""

_WORTH = 1e-4
"""The part of the makespan that a move has to save at least."""

_PATHS = 24
"""The paths that are kept beside those of the ranks; older ones seldom bound a move from where the cut is."""


class Shortened(NamedTuple):
    """A cut with the makespan of its pipeline, and how many replays it took to find it."""

    cut: Cut
    makespan: float
    replays: int


def shorten(
    start: Cut,
    placement: Placement,
    microbatches: int,
    seconds: Seconds,
    replay: Callable[[Cut], CriticalPath],
    fits: Callable[[Cut], bool] = lambda cut: True,
    least: Sequence[int] = (),
    replays: int = REPLAYS,
) -> Shortened:
    """Return ``start`` after moves that each shorten the pipeline, until none does or ``replays`` are over.

    ``replay`` returns the critical path of a cut under the schedule, ``fits`` whether a cut is allowed, and
    ``least`` has the fewest items of each stage, none by default.  The most promising move is tried first.
    """
    least = least or (0,) * len(start)
    paths = _Paths(microbatches * work_of_ranks(placement), Moves(seconds, least))
    cut, refused = start, set()
    makespan = paths.add(replay(cut), times(cut, seconds))
    for done in range(1, replays):
        target = makespan * (1 - _WORTH)
        after = paths.after_moves(cut, times(cut, seconds)).ravel()
        promising = (moved(cut, *divmod(int(at), len(cut))) for at in _rising(after, target))
        chosen = None
        for other in promising:
            if other in refused:
                continue
            if fits(other):
                chosen = other
                break
            refused.add(other)
        if chosen is None:
            return Shortened(cut, makespan, done)
        found = paths.add(replay(chosen), times(chosen, seconds))
        if found < target:
            cut, makespan = chosen, found
        else:
            refused.add(chosen)
    return Shortened(cut, makespan, replays)


def _rising(values: Array, below: float) -> list[int]:
    """Return the places of the values below ``below``, the least value first."""
    (places,) = np.nonzero(values < below)
    return list(places[np.argsort(values[places], kind="stable")])


class _Paths:
    """The critical paths that are known: how often each has the work of each stage, and its other seconds."""

    def __init__(self, ranks: Array, moves: Moves) -> None:
        self._ranks, self._work, self._moves = ranks, ranks, moves
        self._others = np.zeros(len(ranks))

    def add(self, path: CriticalPath, seconds: Array) -> float:
        """Add ``path``, found with ``seconds`` of the stages, and return its makespan."""
        work = np.array(path.work, dtype=float)
        others = path.makespan - float((work * seconds).sum())
        keep = len(self._ranks)
        older = slice(max(keep, len(self._work) - _PATHS + 1), None)
        self._work = np.concatenate([self._ranks, self._work[older], work[None]])
        self._others = np.concatenate([self._others[:keep], self._others[older], [others]])
        return path.makespan

    def after_moves(self, cut: Cut, seconds: Array) -> Array:
        """Return a lower bound of the makespan after each move: source x target, infinite for none.

        ``seconds`` are those of the stages of ``cut``.
        """
        now = np.einsum("psk,sk->p", self._work, seconds) + self._others
        found = longest(now, *self._moves.by_stage(self._work, cut))
        found[self._moves.impossible(cut)] = np.inf
        return found
