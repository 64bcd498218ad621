"""A cut of a row of items into stages, and what moving one item from a stage to another changes.

The items are the layers of a model in order, and multi-token prediction behind them.  The embedding, and the
output layer with the loss, stay in the first and the last stage.  A move takes an item out of one stage and
puts one into another; the stages between them keep their number of items and shift by one.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from megatron_pp_ext.schedule.placement import Placement

type Cut = tuple[int, ...]
"""The number of items of each stage, in model order."""

type Seconds = Callable[[int, int, int], tuple[float, float, float]]
"""(stage, first, end) -> the seconds of F, I and W of the stage if it has the items first, ..., end - 1."""

type Array = Any
"""An array of floats."""


def bounds(cut: Cut) -> Iterator[tuple[int, int, int]]:
    """Yield every stage of ``cut`` with its first item and the one behind its last."""
    ends = list(accumulate(cut))
    yield from zip(range(len(cut)), [0, *ends], ends, strict=False)


def times(cut: Cut, seconds: Seconds) -> Array:
    """Return the seconds of F, I and W of each stage: stages x 3."""
    return np.array([seconds(*where) for where in bounds(cut)])


def moved(cut: Cut, source: int, target: int) -> Cut:
    """Return ``cut`` with an item moved from stage ``source`` to stage ``target``."""
    return tuple(count - (s == source) + (s == target) for s, count in enumerate(cut))


def work_of_ranks(placement: Placement) -> Array:
    """Return for each rank which stages' seconds are its own: ranks x stages x 3, of ones and zeros."""
    own = np.zeros((placement.ranks, placement.stages, 3))
    for rank in range(placement.ranks):
        own[rank, list(placement.stages_of(rank))] = 1.0
    return own


def changes(work: Array, cut: Cut, seconds: Seconds, least: Sequence[int]) -> Array:
    """Return by how many seconds each sum of work changes with each move: sums x source x target.

    ``work`` (sums x stages x 3) says how often the F, I and W of every stage are in a sum.  A move out of a
    stage that has no more than its ``least`` items is infinite, and so is one that moves nothing.
    """
    stages = len(cut)
    # By stage: it loses its last item, or its first; it gains one behind, or in front; it shifts either way.
    lost_last, lost_first, gained_last, gained_first, later, earlier = np.zeros((6, stages, 3))
    items = sum(cut)
    for stage, first, end in bounds(cut):
        now = np.array(seconds(stage, first, end))
        if end > first:
            lost_last[stage] = seconds(stage, first, end - 1) - now
            lost_first[stage] = seconds(stage, first + 1, end) - now
        if end < items:
            gained_last[stage] = seconds(stage, first, end + 1) - now
            later[stage] = seconds(stage, first + 1, end + 1) - now
        if first > 0:
            gained_first[stage] = seconds(stage, first - 1, end) - now
            earlier[stage] = seconds(stage, first - 1, end - 1) - now

    def summed(change: Array) -> Array:
        return np.einsum("psk,sk->ps", work, change)

    def before(change: Array) -> Array:
        """Return the sums of the changes of all stages before each one, and of all."""
        return np.concatenate([np.zeros((len(work), 1)), np.cumsum(summed(change), axis=1)], axis=1)

    shifted, back = before(earlier), before(later)
    given, taken = summed(lost_last) - shifted[:, 1:], summed(gained_first) + shifted[:, :-1]
    onwards = given[:, :, None] + taken[:, None, :]
    given, taken = summed(lost_first) + back[:, :-1], summed(gained_last) - back[:, 1:]
    backwards = given[:, :, None] + taken[:, None, :]
    source, target = np.indices((stages, stages))
    found = np.where(source < target, onwards, backwards)
    found[:, source == target] = np.inf
    found[:, np.array(cut) <= np.array(least)] = np.inf
    return found
