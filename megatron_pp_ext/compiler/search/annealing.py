"""Shorten a finished order by moving single actions (job-shop local search with simulated annealing).

The makespan is the length of a chain of actions, each of which starts the moment the one before it ends
or its message arrives.  Only a change to that chain can shorten the schedule, so a move takes an action of
it and puts it some places earlier or later in its rank's order (the neighbourhood of Nowicki and Smutnicki,
Management Science 42(6), 1996, with longer moves, and now and then of two or three actions in a row).  Where
a move breaks the memory limit, W are pulled forward to free memory.  The obstacle may also be an action that
is not on the chain, so some moves take any action of the rank.

A move is first judged from the actions that change places alone: what reaches them, and what follows them,
stays as it was (Taillard, European Journal of Operational Research 47, 1990).  Only promising moves are
timed.  Among orders of equal makespan, those are better whose ranks end earlier.  A worse order is kept now
and then, ever more rarely (Kirkpatrick, Gelatt and Vecchi, Science 220, 1983).
"""

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.compiler.search.problem import Orders, Problem
from megatron_pp_ext.compiler.search.tables import Integers, Tables, draw, generator, tables, time_orders
from megatron_pp_ext.compiler.search.timed_order import (
    TimedOrder,
    ends,
    estimate,
    keep_move,
    rearranged,
    timed_order,
    try_move,
    undo_move,
)
from megatron_pp_ext.schedule.loops import Loop, part_of_loop

_DISTANCES = np.array([-8, -4, -3, -2, -2, -1, -1, -1, 1, 1, 1, 2, 2, 3, 4, 8])

_WIDTHS = np.array([1, 1, 1, 1, 1, 1, 2, 3])

_ANY = 6
"""One in this many moves takes any action of the rank."""

_ACTIONS = 16
_WARMEST, _COOLEST = 4, 200
"""At first a worse order may, in half of all cases, be longer by one part of an action.

There is a part for every ``_ACTIONS`` actions of the order, within these bounds: on large pipelines warmer
walks find no shorter orders, and they take longer, as more moves are timed.
"""

_FINE = 1024
"""The temperature is in this fraction of a time unit."""

_SLICE = 200_000
"""Moves without a look at the keyboard's interrupt."""


def anneal(problem: Problem, orders: Orders, moves: int, seed: int, floor: int = 0) -> tuple[int, Orders]:
    """Return the shortest makespan met in ``moves`` moves from ``orders``, and its orders.

    For split backwards only, which keep the limits.  The walk ends when the makespan is ``floor``.
    """
    timed = time_orders(problem, orders)
    if timed is None:
        raise ValueError("orders to anneal wait for each other: anneal only what has run")
    state, best = timed_order(problem, orders, timed.starts), np.array(orders)
    random, lengths = generator(seed), np.zeros(4, np.int64)
    part = min(_COOLEST, max(_WARMEST, problem.size // _ACTIONS))
    warm = _FINE * max(problem.duration[: problem.stations]) // part
    for first in range(0, max(1, moves), _SLICE):
        last = min(moves, first + _SLICE)
        walk(tables(problem), state, best, lengths, random, first, last, moves, warm, floor)
    return int(lengths[2]), best.tolist()


@Loop
def walk(
    tables: Tables,
    state: TimedOrder,
    best: Integers,
    lengths: Integers,
    random: NDArray[np.uint64],
    first_move: int,
    last_move: int,
    moves: int,
    warm: int,
    floor: int,
) -> None:
    """Make moves ``first_move`` to ``last_move`` of all ``moves``; leave the best order in ``best``.

    ``lengths`` are the makespan and the sum of the ranks' ends, of ``state`` and of ``best``.
    """
    ranks, actions = best.shape
    if first_move == 0:
        lengths[0], lengths[1] = lengths[2], lengths[3] = ends(tables, state)
    now, now_ends, shortest, shortest_ends = lengths[0], lengths[1], lengths[2], lengths[3]
    new = np.empty(actions, np.int64)
    # The best order is written down when the walk leaves it.
    is_best = False
    for move in range(first_move, last_move):
        if shortest <= floor:
            break
        action = draw(random, len(state.start))
        if draw(random, _ANY) and state.start[action] + state.tail[action] < now:
            continue
        rank, at = tables.home[action // tables.microbatches], state.place[action]
        width, steps = _WIDTHS[draw(random, len(_WIDTHS))], _DISTANCES[draw(random, len(_DISTANCES))]
        first, last = rearranged(tables, state, rank, at, width, steps, new)
        if first == last:
            continue
        luck = _luck(random) * (warm * (moves - move) // moves)
        worse = (luck + draw(random, _FINE)) // _FINE
        later = (luck * (ranks + 1) + draw(random, _FINE)) // _FINE
        if estimate(tables, state, rank, new, first, last) > now + worse:
            continue
        changed, possible = try_move(tables, state, rank, new, first, last, now + worse)
        length, sum_of_ends = ends(tables, state)
        if not possible or length + sum_of_ends > now + now_ends + later:
            undo_move(state, rank, new, first, last, changed)
            continue
        better = length < shortest or (length == shortest and sum_of_ends < shortest_ends)
        if is_best and not better:
            _write(tables, state, best)
            for place in range(first, last):
                best[rank, place] = new[place] // tables.microbatches
        is_best = better
        keep_move(tables, state, rank, first, last, changed)
        now, now_ends = length, sum_of_ends
        if better:
            shortest, shortest_ends = now, now_ends
    if is_best:
        _write(tables, state, best)
    lengths[0], lengths[1], lengths[2], lengths[3] = now, now_ends, shortest, shortest_ends


@part_of_loop
def _write(tables: Tables, state: TimedOrder, best: Integers) -> None:
    ranks, actions = best.shape
    for rank in range(ranks):
        for place in range(actions):
            best[rank, place] = state.order[rank, place] // tables.microbatches


@part_of_loop
def _luck(random: NDArray[np.uint64]) -> int:
    """Return a random number whose chance falls by half from each number to the next."""
    bits = draw(random, 1 << 30)
    luck = 0
    while bits & 1:
        luck += 1
        bits >>= 1
    return luck
