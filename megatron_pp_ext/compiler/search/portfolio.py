"""The searches in turn, each with its share of a fixed number of trials.

List scheduling looks for building blocks on a pipeline short enough to try many; the best blocks
are carried over to the full number of microbatches and adapted once more; the orders they give are
polished.  A trial on a larger pipeline takes longer, so there are fewer of them, by sizes alone.
"""

from collections.abc import Iterator
from random import Random

from megatron_pp_ext.compiler.search.dispatch import dispatch
from megatron_pp_ext.compiler.search.polish import polish
from megatron_pp_ext.compiler.search.problem import Orders, Problem
from megatron_pp_ext.compiler.search.rebuild import rebuild
from megatron_pp_ext.compiler.search.tune import best, improve, tune

_SIZE = 768
"""The actions of a pipeline on which a search may use all its trials: 8 ranks, 16 microbatches."""

_FEWEST = 90
"""Trials on a shortened pipeline, however large it is: fewer do not find a usable block."""

_MOVES = 8
"""Moves of the polish for each trial of list scheduling; one takes about an eighth of the time."""

_WORSE = (30, 100, 10, 300)
"""How rarely the polish of each of the best plans lengthens its schedule."""

_SMALL = 400
"""The most actions of a pipeline that is rebuilt window by window: on larger ones windows find little."""

_VISITS = 80
"""Partial orders that windows may visit for each trial; at most half as many as there are actions."""

_ROUNDS = 4
"""A search starts afresh this often: four short walks find more than one that is four times as long.

Large pipelines cannot afford to.  In one of them a wave's legs may have pauses of their own.
"""

_LONGEST = 500
"""Trials of one round at most; more than ``_ROUNDS`` of these mean more rounds."""


def search(problem: Problem, trials: int, floor: int) -> Iterator[tuple[int, Orders, str]]:
    """Makespan, orders and origin of what ``trials`` trials find, all within the limits.

    ``floor`` is a makespan that cannot be beaten: the search ends there.
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
        done = dispatch(problem, found[0][1].knobs(problem))
        if done is not None:
            yield *done, "list scheduling"
            effort = trials * min(_VISITS, problem.size // 2)
            yield *rebuild(problem, done[1], effort, random, floor), "list scheduling, rebuilt"
        return
    moves = _MOVES * _scaled(trials, problem)
    for (_, plan), worse in zip(found, _WORSE, strict=False):
        done = dispatch(problem, plan.knobs(problem))
        if done is not None:
            yield *done, "list scheduling"
            polished = polish(problem, done[1], moves // len(found), random, worse=worse, floor=floor)
            yield *polished, "list scheduling, polished"


def _scaled(trials: int, problem: Problem) -> int:
    """As many trials as take the time of ``trials`` on a pipeline of ordinary size."""
    return trials * _SIZE // max(_SIZE, problem.size)
