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

_FEWEST = 100
"""Trials on a shortened pipeline, however large it is, or the starting points would not all be tried."""

_MOVES = 6
"""Moves of the polish for each trial: one takes about a sixth of a list schedule."""

_WORSE = (10, 100, 3, 30)
"""How rarely the polish of each of the best plans lengthens its schedule."""


def search(problem: Problem, trials: int, floor: int) -> Iterator[tuple[int, Orders, str]]:
    """Makespan, orders and origin of what ``trials`` trials find, all within the limits.

    ``floor`` is a makespan that cannot be beaten: the search ends there.
    """
    random = Random(f"{problem.placement.ranks}/{problem.microbatches}")
    ranks, microbatches = problem.placement.ranks, problem.microbatches
    short = problem.shortened(min(microbatches, max(2 * ranks, _SIZE // (3 * problem.placement.stages))))
    found = tune(short, max(min(trials, _FEWEST), _scaled(trials, short)), random)
    plans = [plan for _, plan in found]
    if short.microbatches < microbatches:
        found = retimed(problem, plans)
        if found:
            found[0] = improve(problem, found[0], _scaled(trials, problem) // 4, random)

    moves = _MOVES * _scaled(trials, problem)
    best: tuple[int, Orders] | None = None
    for (_, plan), worse in zip(found, _WORSE, strict=False):
        done = dispatch(problem, plan.knobs(problem))
        if done is None:
            continue
        if best is None:
            yield *done, "list scheduling"
        polished = polish(problem, done[1], moves // len(found), random, worse=worse, floor=floor)
        if best is None or polished[0] < best[0]:
            best = polished
            yield *polished, "list scheduling, polished"
        if best[0] <= floor:
            return


def _scaled(trials: int, problem: Problem) -> int:
    """As many trials as take the time of ``trials`` on a pipeline of ordinary size."""
    return trials * _SIZE // max(_SIZE, problem.size)
