"""Run the searches one after the other, each with its share of a fixed number of trials.

List scheduling looks for building blocks on a pipeline with few microbatches, on which many can be tried.
The best blocks are carried over to the full number of microbatches and adapted once more.  What results, and
the published orders, then compete in annealing: the better ones get a share of the moves, the best of these
another, and the very best the rest.  A trial on a larger pipeline takes longer, so there are fewer of them;
their number depends on sizes alone, never on a clock.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from random import Random

from megatron_pp_ext.compiler.search.annealing import anneal
from megatron_pp_ext.compiler.search.integer_timing import time_orders
from megatron_pp_ext.compiler.search.list_scheduling import list_schedule
from megatron_pp_ext.compiler.search.problem import Orders, Problem
from megatron_pp_ext.compiler.search.tune import best, improve, tune

Found = tuple[int, Orders, str]
"""A makespan, the orders that have it, and where they come from."""

_LISTED = 12_288
"""Actions that the list schedules of one trial have together."""

_SMALL = 512
"""A pipeline with fewer actions has no more list schedules than one with so many."""

_SHORT = 768
"""The fewest actions of a pipeline that is shortened."""

_ROUND = 1000
"""List schedules of one fresh start.  In one of four the legs of a wave may have pauses of their own."""

_MOVES = 7150
"""Moves of annealing for each trial, on a small pipeline; for every 16 actions there is one more."""

_MOST_MOVES = 9000
"""The most moves for each trial."""

_TURNS = ((4, 1), (2, 1), (1, 6))
"""How many orders compete in each round of annealing, and how many eighths of the moves they share.

One long walk finds more than several short ones, and where it begins matters little.
"""

_AGAIN = ((1, 6), (1, 6), (1, 6))
"""Turns after these on pipelines of fewer than ``_FEW`` actions, where a move takes the least time.

The walks of one small pipeline end up to half a percent apart.
"""

_FEW = 256

_CHANCE = 20
"""An order that is longer than the shortest one by more than one part in so many is left out.

On large pipelines all list schedules are often much longer than the published orders.
"""


def search(
    problem: Problem, trials: int, floor: int, starts: Sequence[tuple[Orders, str]]
) -> Iterator[Found]:
    """Yield the makespan, orders and origin of each result of ``trials`` trials; all keep the limits.

    ``starts`` are orders with their origins, which may have whole backwards and break the limits.  ``floor``
    is a lower bound on the makespan, at which annealing ends.  A caller may stop iterating at any time.
    """
    pool: list[Found] = []
    for result in chain(_known(problem, starts), _listed(problem, trials)):
        yield result
        pool.append(result)
    moves = trials * min(_MOST_MOVES, _MOVES + problem.size // 16)
    turns = (*_TURNS, *_AGAIN) if problem.size < _FEW else _TURNS
    for turn, (rivals, eighths) in enumerate(turns):
        pool = sorted(pool, key=lambda result: result[0])[:rivals]
        pool = [result for result in pool if result[0] * _CHANCE <= pool[0][0] * (_CHANCE + 1)]
        for at, (_, orders, origin) in enumerate(pool):
            share = moves * eighths // (8 * len(pool))
            annealed = f"{origin}, annealed" if turn == 0 else origin
            pool[at] = (*anneal(problem, orders, share, len(_TURNS) * at + turn, floor), annealed)
            yield pool[at]


def _known(problem: Problem, starts: Sequence[tuple[Orders, str]]) -> Iterator[Found]:
    """Yield the ``starts`` that keep the limits, with their backwards split."""
    for orders, origin in starts:
        split = problem.split(orders)
        timed = time_orders(problem, split) if problem.fits(split) else None
        if timed is not None:
            yield timed.makespan, split, origin


def _listed(problem: Problem, trials: int) -> Iterator[Found]:
    """Yield the best list schedules of every fresh start."""
    fewest = max(2 * problem.placement.ranks, _SHORT // (3 * problem.placement.stages))
    short = problem.shortened(min(problem.microbatches, fewest))
    lists = _lists(trials, short)
    for number in range(max(1, lists // _ROUND)):
        random = Random(f"{problem.placement.ranks}/{problem.microbatches}/{number}")
        each_leg = problem.placement.chunks > 2 and number % 4 == 1
        plans = tune(short, min(lists, _ROUND), random, each_leg=each_leg)
        if short.microbatches < problem.microbatches:
            plans = best(problem, [plan for _, plan in plans])
            if plans:
                plans[0] = improve(problem, plans[0], min(_lists(trials, problem), _ROUND) // 4, random)
        for _, plan in plans:
            done = list_schedule(problem, plan.knobs(problem))
            if done is not None:
                yield *done, "list scheduling"


def _lists(trials: int, problem: Problem) -> int:
    """Return how many list schedules ``trials`` trials have on a pipeline of this size."""
    return trials * _LISTED // max(_SMALL, problem.size)
