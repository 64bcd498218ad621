"""When chains enter the pipeline: list scheduling again and again, each time with one change."""

from typing import NamedTuple

import numpy as np

from megatron_pp_ext.features.slices.listing import listed
from megatron_pp_ext.features.slices.problem import Entry, Floats, Integers, Problem, State
from megatron_pp_ext.schedule.loops import Loop

CHANGES = 3
"""How many kinds of changes there are: a chain moves, two change places, or the gap after one is another."""

_LONGEST_GAP = 1.2
"""The longest gap that is tried after a chain, by the work of the chain."""

_NO_GAP = 0.2
"""The part of all changes of a gap that take it away."""


class Climb(NamedTuple):
    """What is tried, and what was found.

    First come ``orders[k]`` of the chains with ``paces[k]``.  ``draws`` are numbers from 0 to 1, three for
    each change of the best of them: its kind (``CHANGES``), a chain, and what becomes of it.  The climb ends
    at ``floor``.  ``order`` and ``gaps`` are those of the best entry.
    """

    orders: Integers
    paces: Floats
    draws: Floats
    floor: float
    order: Integers
    gaps: Floats


@Loop
def climbed(problem: Problem, climb: Climb, state: State, actions: Integers) -> float:
    """Return the shortest step that is found; leave its entry in ``climb`` and its ``actions`` there."""
    orders, paces, draws, floor, order, gaps = climb
    count = orders.shape[1]
    listing = np.empty_like(actions)
    best, pace = np.inf, 0.0
    for at in range(len(orders)):
        if best <= floor:
            break
        found = listed(problem, Entry(orders[at], gaps, paces[at]), state, best, listing)
        if found < best:
            best, pace = found, paces[at]
            order[:], actions[:] = orders[at], listing
    tried, tried_gaps = order.copy(), gaps.copy()
    for at in range(len(draws)):
        if best <= floor:
            break
        tried[:], tried_gaps[:] = order, gaps
        what, one, other = CHANGES * draws[at, 0], int(count * draws[at, 1]), int(count * draws[at, 2])
        chain = tried[one]
        if what < 1:
            step = 1 if one < other else -1
            for place in range(one, other, step):
                tried[place] = tried[place + step]
            tried[other] = chain
        elif what < 2:
            tried[one], tried[other] = tried[other], chain
        else:
            tried_gaps[chain] = _LONGEST_GAP * max(0.0, draws[at, 2] - _NO_GAP) / (1 - _NO_GAP)
        found = listed(problem, Entry(tried, tried_gaps, pace), state, best, listing)
        if found <= best:
            best = found
            order[:], gaps[:], actions[:] = tried, tried_gaps, listing
    return best
