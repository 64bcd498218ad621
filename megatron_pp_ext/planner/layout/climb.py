"""Moves single items between stages as long as a cut gets better by it, with critical paths as bounds.

``climb`` is the loop.  Its caller defines the value of a cut, and the moves that promise a better one:

levelled   the ranks take equally long, as far as whole items allow
fitted     no rank needs more memory than there is
shortened  the pipeline of a schedule is short
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.planner.layout.cut import (
    Array,
    Cut,
    Moves,
    Seconds,
    balanced,
    moved,
    times,
    work_of_ranks,
)
from megatron_pp_ext.schedule.loops import Loop
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.timing import CriticalPath

_PATHS = 24
"""The paths that are kept with those of the ranks; older ones seldom bound a move from where the cut is."""

Floats = NDArray[np.float64]


class CriticalPaths:
    """The paths that are known: how often each has the work of each stage, and its other seconds.

    ``ranks`` are the paths of the ranks' own work: ranks x stages x 4.

    A replay of the schedule gives its makespan and its critical path.  The same actions wait for each other
    under any cut, so that no makespan is below the path's seconds with that cut's stages.  The work of a rank
    in all microbatches is such a path as well.  Only a move that shortens every path known so far is worth a
    replay, and each replay adds a path, so that a few replays go through all moves.  This is Kelley's method
    of cutting planes (1960) for the makespan, which is convex in the seconds of the stages, with one move at
    a time in place of a linear program.
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


REPLAYS = 48
"""The replays that a cut is shortened with at most."""

FITTING_MOVES = 64
"""The moves whose memory is looked at; a model that fits nearly needs a few."""

_LEVELLED = 10_000
"""More moves than any model needs to level its ranks."""

_WORTH = 1e-4
"""The part of the makespan that a move has to save at least."""

_ROUNDING = 1e-9
"""The part by which a sum has to shrink to count as smaller, far above rounding errors."""


class Stages(Protocol):
    """Stages that are cut from a row of items."""

    @property
    def placement(self) -> Placement:
        """Where the stages are."""

    @property
    def items(self) -> int:
        """The number of items."""

    @property
    def least(self) -> Cut:
        """The fewest items of each stage."""

    @property
    def seconds(self) -> Seconds:
        """The seconds of a stage with the items first, ..., end - 1."""


class Climbed(NamedTuple):
    """A cut with its value, and the number of cuts whose value was asked for."""

    cut: Cut
    value: float
    looked_at: int


def climb(
    cut: Cut,
    value: Callable[[Cut], float],
    promising: Callable[[Cut, float], Iterable[Cut]],
    most: int,
    worth: float,
) -> Climbed:
    """Return ``cut`` after moves that each lower its value by the part ``worth`` of it, until none does.

    ``promising`` yields the cuts a move away whose value may be below a given one, the most promising first.
    At most ``most`` cuts are looked at, and none twice.
    """
    best, tried = value(cut), {cut}
    while len(tried) < most:
        below = best * (1 - worth)
        other = next((other for other in promising(cut, below) if other not in tried), None)
        if other is None:
            break
        tried.add(other)
        now = value(other)
        if now < below:
            cut, best = other, now
    return Climbed(cut, best, len(tried))


def levelled(stages: Stages, least: Cut) -> Cut:
    """Return the cut of equally long stages, with items moved until no move evens out the ranks.

    A rank with several stages makes up for a long one by short others, as the first rank of a V does, which
    has both ends of the model.  ``least`` are the fewest items of each stage.
    """
    start, loads = balanced(stages.items, stages.seconds, least), _Loads(stages, least)

    def promising(cut: Cut, below: float) -> Iterator[Cut]:
        return (moved(cut, *move) for move in _rising(loads.after_moves(cut), below))

    return climb(start, loads.squares, promising, _LEVELLED, _ROUNDING).cut


def fitted(
    stages: Stages,
    cut: Cut,
    totals: Callable[[Cut], Sequence[float]],
    limit: float,
    moves: int = FITTING_MOVES,
) -> Cut | None:
    """Return ``cut`` with items moved until no rank needs more than ``limit``; None where that is not found.

    At most so many ``moves`` are looked at.  ``totals`` returns the bytes of every rank.  An item of the
    fullest rank goes where the ranks' seconds stay most even, among the places that have memory left for it.
    """
    totals, loads, rank_of = cache(totals), _Loads(stages, stages.least), stages.placement.rank_of

    def excess(cut: Cut) -> float:
        return sum(max(0.0, total - limit) for total in totals(cut))

    def promising(cut: Cut, below: float) -> Iterator[Cut]:
        now = totals(cut)
        fullest = int(np.argmax(now))
        for source, target in _rising(loads.after_moves(cut), np.inf) if below else ():
            if rank_of(source) == fullest != rank_of(target) and now[rank_of(target)] < limit:
                yield moved(cut, source, target)

    last = climb(cut, excess, promising, moves + 1, 0.0)
    return None if last.value else last.cut


def shortened(
    stages: Stages,
    cut: Cut,
    microbatches: int,
    replay: Callable[[Cut], CriticalPath],
    fits: Callable[[Cut], bool] = lambda cut: True,
    replays: int = REPLAYS,
) -> Climbed:
    """Return ``cut`` after moves that each shorten the pipeline, until none does or ``replays`` are over.

    ``replay`` returns the critical path of a cut under the schedule, and ``fits`` whether a cut is allowed.
    Only a move that shortens every path known so far is worth a replay; see ``CriticalPaths``.
    """
    # Numba takes a while to import, and most jobs and estimates choose no layout.

    fits = cache(fits)
    moves = Moves(stages.seconds, stages.least)
    paths = CriticalPaths(microbatches * work_of_ranks(stages.placement), moves)

    def makespan(cut: Cut) -> float:
        return paths.add(replay(cut), times(cut, stages.seconds))

    def promising(cut: Cut, below: float) -> Iterator[Cut]:
        after = paths.after_moves(cut, times(cut, stages.seconds))
        neighbours = (moved(cut, *move) for move in _rising(after, below))
        return filter(fits, neighbours)

    return climb(cut, makespan, promising, replays, _WORTH)


class _Loads:
    """The seconds of a microbatch on each rank: how even they are, under a cut and after each move."""

    def __init__(self, stages: Stages, least: Cut) -> None:
        self._seconds, self._work = stages.seconds, work_of_ranks(stages.placement)
        self._moves = Moves(stages.seconds, least)

    def squares(self, cut: Cut) -> float:
        """Return the sum of the squares, which is least where all ranks take equally long."""
        return float((self._of(cut) ** 2).sum())

    def after_moves(self, cut: Cut) -> Array:
        """Return the sum of the squares after each move: source x target, infinite for none."""
        changes = self._moves.changes(self._work, cut)
        return ((self._of(cut)[:, None, None] + changes) ** 2).sum(axis=0)

    def _of(self, cut: Cut) -> Array:
        return np.einsum("psk,sk->p", self._work, times(cut, self._seconds))


def _rising(values: Array, below: float) -> Iterator[tuple[int, int]]:
    """Yield the moves (source, target) with ``values`` below ``below``, the least value first."""
    flat = values.ravel()
    (places,) = np.nonzero(flat < below)
    for at in places[np.argsort(flat[places], kind="stable")]:
        yield divmod(int(at), len(values))
