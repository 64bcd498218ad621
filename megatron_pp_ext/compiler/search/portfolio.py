"""Run the searches in turn, each with its share of a fixed number of trials.

List scheduling looks for building blocks on a pipeline with few microbatches, on which many can be tried.
The best blocks are carried over to the full number of microbatches and adapted once more.  What results, and
the published orders, then compete in annealing: all get a share of the moves, the better ones another, and
the best one the rest.  A trial on a larger pipeline takes longer, so there are fewer of them; their number
depends on sizes alone, never on a clock.
"""

from collections.abc import Iterator, Sequence
from random import Random

from megatron_pp_ext.compiler.search.annealing import anneal
from megatron_pp_ext.compiler.search.integer_timing import time_orders
from megatron_pp_ext.compiler.search.list_scheduling import list_schedule
from megatron_pp_ext.compiler.search.problem import Orders, Problem
from megatron_pp_ext.compiler.search.tune import Plan, best, improve, tune

Found = tuple[int, Orders, str]
"""A makespan, the orders that have it, and where they come from."""

_SIZE = 6144
"""The most actions with which a search has all its trials: 16 ranks, 64 microbatches, two chunks."""

_SHORT = 768
"""The fewest actions of a pipeline that is shortened."""

_FEWEST = 90
"""Trials on a shortened pipeline, however large it is: fewer do not find a usable block."""

_ROUND = 250
"""Trials of one fresh start: four short walks find more than one that is four times as long.

In one of four the legs of a wave may have pauses of their own.
"""

_MOVES = 2900
"""Moves of annealing for each trial, on a small pipeline; for every ten actions there is one more."""

_MOST_MOVES = 24_000
"""The most moves for each trial."""

_RIVALS = (6, 3, 1)
"""How many orders compete for each third of the moves."""


def search(
    problem: Problem, trials: int, floor: int, starts: Sequence[tuple[Orders, str]]
) -> Iterator[Found]:
    """Yield the makespan, orders and origin of each result of ``trials`` trials; all keep the limits.

    ``starts`` are orders with their origins, which may have whole backwards and break the limits.  ``floor``
    is a lower bound on the makespan, at which the search ends.
    """
    pool = [*_known(problem, starts), *_listed(problem, trials)]
    yield from pool
    moves = trials * min(_MOST_MOVES, _MOVES + problem.size // 10)
    for turn, rivals in enumerate(_RIVALS):
        pool = sorted(pool, key=lambda found: found[0])[:rivals]
        for at, (length, orders, origin) in enumerate(pool):
            if length <= floor:
                return
            share = moves // (len(_RIVALS) * len(pool))
            annealed = f"{origin}, annealed" if turn == 0 else origin
            pool[at] = (*anneal(problem, orders, share, len(_RIVALS) * at + turn, floor), annealed)
            yield pool[at]


def _known(problem: Problem, starts: Sequence[tuple[Orders, str]]) -> Iterator[Found]:
    """Yield those of ``starts`` that keep the limits, with their backwards split."""
    for orders, origin in starts:
        split = problem.split(orders)
        timed = time_orders(problem, split) if problem.fits(split) else None
        if timed is not None:
            yield timed.makespan, split, origin


def _listed(problem: Problem, trials: int) -> Iterator[Found]:
    """Yield the best list schedules of every fresh start."""
    trials = _scaled(trials, problem)
    for number in range(max(1, trials // _ROUND)):
        random = Random(f"{problem.placement.ranks}/{problem.microbatches}/{number}")
        each_leg = problem.placement.chunks > 2 and number % 4 == 1
        for plan in _plans(problem, min(trials, _ROUND), random, each_leg=each_leg):
            done = list_schedule(problem, plan.knobs(problem))
            if done is not None:
                yield *done, "list scheduling"


def _plans(problem: Problem, trials: int, random: Random, *, each_leg: bool) -> list[Plan]:
    """Return the best plans that ``trials`` list schedules find, first on fewer microbatches."""
    fewest = max(2 * problem.placement.ranks, _SHORT // (3 * problem.placement.stages))
    short = problem.shortened(min(problem.microbatches, fewest))
    found = tune(short, max(min(trials, _FEWEST), _scaled(trials, short)), random, each_leg=each_leg)
    if short.microbatches < problem.microbatches:
        found = best(problem, [plan for _, plan in found])
        if found:
            found[0] = improve(problem, found[0], trials // 4, random)
    return [plan for _, plan in found]


def _scaled(trials: int, problem: Problem) -> int:
    """Return the number of trials that take as long as ``trials`` on a pipeline of ordinary size."""
    return trials * _SIZE // max(_SIZE, problem.size)
