"""Run the searches in turn, each with its share of a fixed number of trials.

List scheduling looks for building blocks on a pipeline with few microbatches, on which many can be tried.
The best blocks are carried over to the full number of microbatches and adapted once more.  Then the
resulting orders are rebuilt window by window or polished.  A trial on a larger pipeline takes longer, so
there are fewer of them; their number depends on sizes alone, never on a clock.
"""

from collections.abc import Iterator
from random import Random

from megatron_pp_ext.compiler.search.list_scheduling import list_schedule
from megatron_pp_ext.compiler.search.polish import polish
from megatron_pp_ext.compiler.search.problem import Orders, Problem
from megatron_pp_ext.compiler.search.rebuild import rebuild
from megatron_pp_ext.compiler.search.tune import best, improve, tune

_SIZE = 768
"""The actions of a pipeline on which a search may use all its trials: 8 ranks, 16 microbatches."""

_FEWEST = 90
"""Trials on a shortened pipeline, however large it is: fewer do not find a usable block."""

_MOVES = 8
"""Moves of ``polish`` for each trial of list scheduling; a move takes about an eighth of a trial's time."""

_WORSE = (30, 100, 10, 300)
"""One in this many moves may lengthen the schedule, for the polish of each of the best plans."""

_SMALL = 400
"""The most actions of a pipeline that is rebuilt window by window; on larger ones this finds little."""

_VISITS = 80
"""Partial orders that windows may visit for each trial; at most half as many as there are actions."""

_ROUNDS = 4
"""The number of fresh starts of a search: four short walks find more than one that is four times as long.

Large pipelines have a single one, for lack of time.  In one of the four, the legs of a wave may have pauses
of their own.
"""

_LONGEST = 500
"""The most trials of one round; a search with more than twice as many has more rounds."""


def search(problem: Problem, trials: int, floor: int) -> Iterator[tuple[int, Orders, str]]:
    """Yield the makespan, orders and origin of each result of ``trials`` trials; all keep the limits.

    ``floor`` is a lower bound on the makespan, at which the search ends.
    """
    if problem.size > 2 * _SIZE:
        rounds, share = 1, trials
    else:
        share = min(_LONGEST, trials // 2)
        rounds = max(_ROUNDS, _ROUNDS * trials // (2 * _LONGEST))
    for number in range(rounds):
        random = Random(f"{problem.placement.ranks}/{problem.microbatches}/{number}")
        each_leg = problem.placement.chunks > 2 and number % _ROUNDS == 1
        for proposal in _round(problem, share, floor, random, each_leg=each_leg):
            yield proposal
            if proposal[0] <= floor:
                return


def _round(
    problem: Problem, trials: int, floor: int, random: Random, *, each_leg: bool
) -> Iterator[tuple[int, Orders, str]]:
    ranks, microbatches = problem.placement.ranks, problem.microbatches
    short = problem.shortened(min(microbatches, max(2 * ranks, _SIZE // (3 * problem.placement.stages))))
    found = tune(short, max(min(trials, _FEWEST), _scaled(trials, short)), random, each_leg=each_leg)
    if short.microbatches < microbatches:
        found = best(problem, [plan for _, plan in found])
        if found:
            found[0] = improve(problem, found[0], _scaled(trials, problem) // 4, random)
    if found and problem.size <= _SMALL:
        done = list_schedule(problem, found[0][1].knobs(problem))
        if done is not None:
            yield *done, "list scheduling"
            effort = trials * min(_VISITS, problem.size // 2)
            yield *rebuild(problem, done[1], effort, random, floor), "list scheduling, rebuilt"
        return
    moves = _MOVES * _scaled(trials, problem)
    for (_, plan), worse in zip(found, _WORSE, strict=False):
        done = list_schedule(problem, plan.knobs(problem))
        if done is not None:
            yield *done, "list scheduling"
            polished = polish(problem, done[1], moves // len(found), random, worse=worse, floor=floor)
            yield *polished, "list scheduling, polished"


def _scaled(trials: int, problem: Problem) -> int:
    """Return the number of trials that take as long as ``trials`` on a pipeline of ordinary size."""
    return trials * _SIZE // max(_SIZE, problem.size)
