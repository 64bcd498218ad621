"""A cut of a row of items into stages, and the effect of moving one item to another stage.

The items are the layers of a model in order, and multi-token prediction after them.  The embedding, and the
output layer with the loss, stay in the first and the last stage.  A move takes an item out of one stage and
puts one into another; the stages between them keep their number of items and shift by one.
"""

from collections.abc import Callable, Iterator, Sequence
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
    """Return ``cut`` with an item moved from stage ``source`` to stage ``target``."""
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

        ``work`` (sums x stages x 4) says how often the ``Seconds`` of every stage are in a sum.  Moves that
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
