"""A cut of a row of items into stages, cuts in balance, and what moving one item changes.

The items are the layers of a model in order, and multi-token prediction after them.  The embedding, and the
output layer with the loss, stay in the first and the last stage.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from megatron_pp_ext.schedule.placement import Placement

type Cut = tuple[int, ...]
"""The number of items of each stage, in model order."""

type Seconds = Callable[[int, int, int], tuple[float, float, float, float]]
"""(stage, first, end) -> the seconds of the stage if it has the items first, ..., end - 1.

They are the seconds of F, I and W and, below 0, the saving of an I and a W together.
"""

type Array = Any
"""An array of floats."""


def bounds(cut: Cut) -> Iterator[tuple[int, int, int]]:
    """Yield every stage of ``cut`` with its first item and the one after its last."""
    ends = list(accumulate(cut))
    yield from zip(range(len(cut)), [0, *ends], ends, strict=False)


def times(cut: Cut, seconds: Seconds) -> Array:
    """Return the seconds of each stage: stages x 4, as in ``Seconds``."""
    return np.array([seconds(*position) for position in bounds(cut)])


def moved(cut: Cut, source: int, target: int) -> Cut:
    """Return ``cut`` with an item moved from stage ``source`` to stage ``target``.

    The stages between them keep their number of items and shift by one.
    """
    return tuple(count - (s == source) + (s == target) for s, count in enumerate(cut))


def work_of_ranks(placement: Placement) -> Array:
    """Return for each rank which stages' seconds are its own: ranks x stages x 4, of ones and zeros."""
    work = np.zeros((placement.ranks, placement.stages, 4))
    for rank in range(placement.ranks):
        work[rank, list(placement.stages_of(rank))] = 1.0
    return work


class Moved(NamedTuple):
    """By how much sums change when an item is moved, in two parts that add up: sums x stages each.

    ``given`` is of the stage that it is taken out of and ``taken`` of the one that gets it; ``onwards`` where
    the latter is after the former, ``backwards`` where it is in front.
    """

    given_onwards: Array
    taken_onwards: Array
    given_backwards: Array
    taken_backwards: Array


class Moves:
    """Moves of one item, in cuts whose stages take ``seconds`` and have ``least`` items or more."""

    def __init__(self, seconds: Seconds, least: Sequence[int]) -> None:
        self._seconds, self._least = seconds, np.array(least)
        self._known: dict[tuple[int, int, int, int], Sequence[Sequence[float]]] = {}

    def impossible(self, cut: Cut) -> Array:
        """Return which moves are none: source x target, out of a stage with its least items or nowhere."""
        barred = np.eye(len(cut), dtype=bool)
        barred[np.array(cut) <= self._least] = True
        return barred

    def changes(self, work: Array, cut: Cut) -> Array:
        """Return by how many seconds each sum of work changes with each move: sums x source x target.

        ``work`` (sums x stages x 4) is how often the ``Seconds`` of every stage are in a sum.  Moves that
        are none are infinite.
        """
        by_stage = self.by_stage(work, cut)
        onwards, backwards = (
            lost[:, :, None] + gained[:, None, :] for lost, gained in (by_stage[:2], by_stage[2:])
        )
        source, target = np.indices((len(cut), len(cut)))
        changes = np.where(source < target, onwards, backwards)
        changes[:, self.impossible(cut)] = np.inf
        return changes

    def by_stage(self, work: Array, cut: Cut) -> Moved:
        """Return the parts of the changes of each sum of ``work``."""
        items = sum(cut)
        rows = np.array([self._beside(*position, items) for position in bounds(cut)])
        change = rows[:, 1:] - rows[:, :1]
        lost_last, lost_first, gained_last, gained_first, later, earlier = change.transpose(1, 0, 2)

        def summed(change: Array) -> Array:
            return np.einsum("psk,sk->ps", work, change)

        def before(change: Array) -> Array:
            """Return the sums of the changes of all stages before each one, and of all."""
            return np.concatenate([np.zeros((len(work), 1)), np.cumsum(summed(change), axis=1)], axis=1)

        shifted, back = before(earlier), before(later)
        return Moved(
            summed(lost_last) - shifted[:, 1:],
            summed(gained_first) + shifted[:, :-1],
            summed(lost_first) + back[:, :-1],
            summed(gained_last) - back[:, 1:],
        )

    def _beside(self, stage: int, first: int, end: int, items: int) -> Sequence[Sequence[float]]:
        """Return the seconds of a stage as it is and after six changes; as it is where one cannot be.

        It loses its last item, or its first; it gains one at the end, or in front; it shifts either way.
        """
        key = stage, first, end, items
        if key not in self._known:
            now = (first, end)
            changed = (
                (first, end - 1) if end > first else now,
                (first + 1, end) if end > first else now,
                (first, end + 1) if end < items else now,
                (first - 1, end) if first > 0 else now,
                (first + 1, end + 1) if end < items else now,
                (first - 1, end - 1) if first > 0 else now,
            )
            self._known[key] = [self._seconds(stage, *position) for position in (now, *changed)]
        return self._known[key]


_ROUNDING = 1e-9
"""The part by which a sum has to shrink to count as smaller, far above rounding errors."""

type _Choices = list[list[tuple[int, int, float]]]
"""For each stage, the items first, ..., end - 1 that it may have: (first, end, seconds)."""


@lru_cache(maxsize=4096)
def even(items: int, least: Cut) -> Cut:
    """Return a cut whose numbers of items differ by one at most, but for stages that need more.

    The first stages are the longer ones.  ``least`` has the fewest items of each stage; ValueError where
    there are fewer than they need together.
    """
    stages = len(least)
    if sum(least) > items:
        raise ValueError(f"{items} layers do not fill {stages} stages, which need {sum(least)} together")
    share = next(share for share in range(items + 1) if sum(max(share + 1, few) for few in least) > items)
    cut = [max(share, few) for few in least]
    remaining = items - sum(cut)
    for stage in [stage for stage, count in enumerate(cut) if count == share][:remaining]:
        cut[stage] += 1
    return tuple(cut)


def balanced(items: int, seconds: Seconds, least: Cut) -> Cut:
    """Return the cut whose longest stage is shortest, and among these the one with the least sum of squares.

    ``least`` has the fewest items of each stage, and a stage takes no less for more items.  This is an exact
    dynamic program over contiguous cuts in two rounds: the first finds how long the longest stage has to be,
    the second the least sum of squares with stages that are no longer.
    """
    start = even(items, least)
    longest = float(times(start, seconds).sum(axis=1).max())
    choices = _choices(items, seconds, least, longest)
    longest, _ = _chain(choices, items, max)
    shorter = [[choice for choice in stage if choice[2] <= longest * (1 + _ROUNDING)] for stage in choices]
    return _chain(
        shorter, items, lambda total, seconds_of_stage: total + seconds_of_stage * seconds_of_stage
    )[1]


def _choices(items: int, seconds: Seconds, least: Sequence[int], longest: float) -> _Choices:
    """Return the possible ranges of items of each stage, if no stage takes more than ``longest``."""
    before = [0, *accumulate(least)]

    def took(stage: int, first: int, end: int) -> float:
        return math.fsum(seconds(stage, first, end))

    most, end = longest * (1 + _ROUNDING), items
    # A stage begins here at least, or the rest would not fit into it and those after it.
    starts = [*before[:-1]]
    for stage in reversed(range(len(least))):
        start = end
        while start > before[stage] and took(stage, start - 1, end) <= most:
            start -= 1
        starts[stage] = end = start
    choices: _Choices = []
    reached = 0
    for stage, few in enumerate(least):
        later = before[-1] - before[stage + 1]
        choices.append([])
        furthest = 0
        for first in range(starts[stage], min(items - later - few, reached) + 1):
            for end in range(first + few, items - later + 1):
                seconds_of_stage = took(stage, first, end)
                if seconds_of_stage > most:
                    break
                choices[-1].append((first, end, seconds_of_stage))
                furthest = max(furthest, end)
        reached = furthest
    return choices


def _chain(choices: _Choices, items: int, add: Callable[[float, float], float]) -> tuple[float, Cut]:
    """Return the least total of a chain of stages through all items, and its cut; ``add`` adds a stage."""
    ways: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in choices:
        before, reached = ways[-1], dict[int, tuple[float, int]]()
        for first, end, took in stage:
            if first in before:
                total = add(before[first][0], took)
                if end not in reached or total < reached[end][0]:
                    reached[end] = total, first
        ways.append(reached)
    end, counts = items, []
    for way in reversed(ways[1:]):
        first = way[end][1]
        counts.append(end - first)
        end = first
    return ways[-1][items][0], tuple(reversed(counts))
