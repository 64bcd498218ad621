"""Cuts whose stages have equally many items, or take equally long, as far as whole items allow."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

from megatron_pp_ext.planner.layout.cut import Cut, Seconds, times

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
    # A stage begins here at least, or those from it on would not have room for the rest.
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
