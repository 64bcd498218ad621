"""The local search for the shortest step: orders of chains, each tried with one change.

A step is timed under a fixed order of actions (``fixed_order``), or by list scheduling.  Random numbers are
drawn before, and their number limits a search, never a clock: all ranks find the same order.
"""

from typing import NamedTuple

import numpy as np

from megatron_pp_ext.features.units.fixed_order import Fixed, judged
from megatron_pp_ext.features.units.list_scheduling import EntryTimes, Listing, listed
from megatron_pp_ext.features.units.table import Floats, Integers, Table
from megatron_pp_ext.schedule.loops import Loop, part_of_loop

_LONGEST_GAP = 1.2
"""The longest gap that is tried after a chain, by the work of the chain."""

_NO_GAP = 0.2
"""The part of all changes of a gap that take it away."""


class Changes(NamedTuple):
    """Changes of an order, one for each row of ``draws``: numbers from 0 to 1.

    The first of three decides its kind: below ``kinds[0]`` a chain moves, below ``kinds[1]`` two change
    places, below ``kinds[2]`` a stretch is reversed, and else the gap after a chain is another.  The others
    decide which.  At first a change that makes the step longer by up to ``warmth`` of it may stay, by
    ``chances``, and ever less from then on: simulated annealing, with a threshold in place of chance.
    """

    kinds: Floats
    draws: Floats
    warmth: float
    chances: Floats


class Climb(NamedTuple):
    """The first trials, ``orders[k]`` of the chains with ``paces[k]``, and changes of the best of them.

    The climb ends at ``floor``.  ``order`` and ``gaps`` become those of the best entry, and ``actions`` those
    of its list schedule.
    """

    orders: Integers
    paces: Floats
    changes: Changes
    floor: float
    order: Integers
    gaps: Floats
    actions: Integers


class Timing(NamedTuple):
    """How steps are timed: by list scheduling if ``lists``, else under a fixed order within ``limits``."""

    listing: Listing
    fixed: Fixed
    limits: Floats
    lists: bool


@part_of_loop
def _seconds(timing: Timing, table: Table, entry: EntryTimes, until: float, actions: Integers) -> float:
    """Return how long the step takes; infinite where list scheduling knows that it is after ``until``."""
    if timing.lists:
        return listed(timing.listing, table, entry, until, actions)
    return judged(timing.fixed, table, entry.order, timing.limits)


@part_of_loop
def _change(changes: Changes, trial: int, order: Integers, gaps: Floats) -> None:
    count = len(order)
    kind, first, last = (
        changes.draws[trial, 0],
        int(count * changes.draws[trial, 1]),
        int(count * changes.draws[trial, 2]),
    )
    chain = order[first]
    if kind < changes.kinds[0]:
        step = 1 if first < last else -1
        for place in range(first, last, step):
            order[place] = order[place + step]
        order[last] = chain
    elif kind < changes.kinds[1]:
        order[first], order[last] = order[last], chain
    elif kind < changes.kinds[2]:
        first, last = min(first, last), max(first, last)
        while first < last:
            order[first], order[last] = order[last], order[first]
            first, last = first + 1, last - 1
    else:
        gaps[chain] = _LONGEST_GAP * max(0.0, changes.draws[trial, 2] - _NO_GAP) / (1 - _NO_GAP)


@Loop
def climbed(timing: Timing, table: Table, climb: Climb) -> float:
    """Return the shortest step that is found, and leave its entry and its actions in ``climb``."""
    orders, paces, changes, floor, order, gaps, actions = climb
    trials = actions.copy()
    best, pace = np.inf, 0.0
    for at in range(len(orders)):
        if best <= floor:
            break
        took = _seconds(timing, table, EntryTimes(orders[at], gaps, paces[at]), best, trials)
        if took < best:
            best, pace = took, paces[at]
            order[:], actions[:] = orders[at], trials
    now, now_gaps, seconds = order.copy(), gaps.copy(), best
    tried, tried_gaps = order.copy(), gaps.copy()
    count, warmth = len(changes.draws), changes.warmth * best
    for trial in range(count):
        if best <= floor:
            break
        tried[:], tried_gaps[:] = now, now_gaps
        _change(changes, trial, tried, tried_gaps)
        allowed = seconds
        if warmth > 0:
            cooled = (count - trial) / count
            allowed += warmth * cooled * cooled * changes.chances[trial]
        took = _seconds(timing, table, EntryTimes(tried, tried_gaps, pace), allowed, trials)
        if took <= allowed:
            seconds = took
            now[:], now_gaps[:] = tried, tried_gaps
            if took <= best:
                best = took
                order[:], gaps[:], actions[:] = tried, tried_gaps, trials
    return best
