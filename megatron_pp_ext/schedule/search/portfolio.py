"""The searches in turn, each with its share of a fixed number of trials.

List scheduling looks for building blocks on a pipeline short enough to try many; the best blocks
are carried over to the full number of microbatches and adapted once more; the orders they give are
polished.  A trial on a larger pipeline takes longer, so there are fewer of them, by sizes alone.
"""

from collections.abc import Iterator
from random import Random

from megatron_pp_ext.schedule.search.dispatch import dispatch
from megatron_pp_ext.schedule.search.polish import polish
from megatron_pp_ext.schedule.search.problem import Orders, Problem
from megatron_pp_ext.schedule.search.tune import improve, retimed, tune

_SIZE = 768
"""The actions of a pipeline on which a search may use all its trials: 8 ranks, 16 microbatches."""

_FEWEST = 90
"""Trials on a shortened pipeline, however large it is: fewer do not find a usable block."""

_MOVES = 8
"""Moves of the polish for each trial of list scheduling; one takes about an eighth of the time."""

_WORSE = (30, 100, 10, 300)
"""How rarely the polish of each of the best plans lengthens its schedule."""

_ROUNDS = 2
"""A search starts afresh this often: two short walks find more than one that is twice as long.

Small pipelines start more often, large ones cannot afford to.
"""


def search(problem: Problem, trials: int, floor: int) -> Iterator[tuple[int, Orders, str]]:
    """Makespan, orders and origin of what ``trials`` trials find, all within the limits.

    ``floor`` is a makespan that cannot be beaten: the search ends there.
    """
    random = Random(f"{problem.placement.ranks}/{problem.microbatches}")
    rounds = _ROUNDS * max(1, min(4, _SIZE // problem.size)) if problem.size <= 2 * _SIZE else 1
    share = trials // _ROUNDS if rounds > 1 else trials * 2 // 3
    for _ in range(rounds):
        for proposal in _round(problem, share, floor, random):
            yield proposal
            if proposal[0] <= floor:
                return


def _round(problem: Problem, trials: int, floor: int, random: Random) -> Iterator[tuple[int, Orders, str]]:
    ranks, microbatches = problem.placement.ranks, problem.microbatches
    short = problem.shortened(min(microbatches, max(2 * ranks, _SIZE // (3 * problem.placement.stages))))
    found = tune(short, max(min(trials, _FEWEST), _scaled(trials, short)), random)
    if short.microbatches < microbatches:
        found = retimed(problem, [plan for _, plan in found])
        if found:
            found[0] = improve(problem, found[0], _scaled(trials, problem) // 4, random)
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
