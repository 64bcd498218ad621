"""A problem as arrays, for the compiled loops: random numbers, a heap of actions, times in whole numbers."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.compiler.search.problem import Orders, Problem
from megatron_pp_ext.schedule.loops import part_of_loop
from megatron_pp_ext.schedule.walk import Walk

Integers = NDArray[np.int64]

CODE = np.int32
"""The type of a code in an array of orders."""


class Tables(NamedTuple):
    """The numbers of a ``Problem``, by its names.  ``own[r]`` are the stations of rank r.

    A limit is no higher than all that is ever kept together.
    """

    stages: int
    microbatches: int
    duration: Integers
    delay: Integers
    home: Integers
    kept: Integers
    growth: Integers
    limits: Integers
    own: Integers


@lru_cache(maxsize=64)
def tables(problem: Problem) -> Tables:
    """Return the arrays of ``problem``."""
    most = problem.microbatches * sum(problem.growth)
    limits = [min(limit, most) for limit in problem.limits]
    return Tables(
        problem.placement.stages,
        problem.microbatches,
        *(
            np.array(values, np.int64)
            for values in (
                problem.duration,
                problem.delay,
                problem.home,
                problem.kept,
                problem.growth,
                limits,
                problem.stations_by_rank,
            )
        ),
    )


_FACTOR = np.uint64(6364136223846793005)
_STEP = np.uint64(1442695040888963407)
_UPPER = np.uint64(33)


def generator(seed: int) -> NDArray[np.uint64]:
    """Return the state of a generator of random numbers, an array of one number."""
    return np.array([seed], np.uint64)


@part_of_loop
def draw(state: NDArray[np.uint64], below: int) -> int:
    """Return a random number from 0 to ``below`` - 1, at most 2**31, and move ``state`` on.

    It is the upper half of a linear congruential generator's state (Knuth, The Art of Computer Programming 2,
    section 3.3.4), whose product wraps round at 64 bits.
    """
    state[0] = state[0] * _FACTOR + _STEP
    return np.int64(state[0] >> _UPPER) % below  # type: ignore[return-value]


class Heap(NamedTuple):
    """Memory for every action; ``waits`` is whether an action is in the heap.

    An item is a time multiplied by the number of actions, plus an action.

    With ``heapq``, whose lists each move would make anew, the moves take about a tenth longer.
    """

    items: Integers
    waits: NDArray[np.bool_]


def heap_of(count: int) -> Heap:
    """Return an empty heap for actions from 0 to ``count`` - 1."""
    return Heap(np.empty(count, np.int64), np.zeros(count, np.bool_))


@part_of_loop
def push(heap: Heap, size: int, time: int, action: int) -> int:
    """Add ``action`` to the ``size`` actions of the heap unless it is among them; return the new size."""
    if heap.waits[action]:
        return size
    heap.waits[action] = True
    items, at = heap.items, size
    item = time * len(items) + action
    while at and items[(at - 1) >> 1] > item:
        items[at] = items[(at - 1) >> 1]
        at = (at - 1) >> 1
    items[at] = item
    return size + 1


@part_of_loop
def pop(heap: Heap, size: int) -> int:
    """Take the action of the least time, of equal ones the first, from the ``size`` of the heap."""
    items = heap.items
    action = items[0] % len(items)
    heap.waits[action] = False
    item = items[size - 1]
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size - 1:
            break
        if below + 1 < size - 1 and items[below + 1] < items[below]:
            below += 1
        if items[below] >= item:
            break
        items[at] = items[below]
        at = below
    items[at] = item
    return action


class TimedOrders(NamedTuple):
    """When each rank's actions start, in integer time units, and when the last of all ends.

    The first start, of stage 0's F, is at time 0.
    """

    starts: list[Integers]
    makespan: int


def time_orders(problem: Problem, orders: Orders) -> TimedOrders | None:
    """Time ``orders``, whose memory is not checked; None when the ranks wait for each other."""
    walk = Walk(problem.program(orders, is_repeated=True))
    if not walk.is_complete:
        return None
    by_kind = np.array(problem.duration).reshape(4, -1)
    by_kind[1] = by_kind[1, ::-1].copy()  # a microbatch visits the I from the last stage on
    no_head = 0, 0, 0
    durations, delays = [*by_kind.T.ravel(), *no_head], (max(problem.delay), *no_head)
    starts, ends = walk.times(durations, delays, kind=int)
    of_actions = starts[walk.step_of[:-1]]
    return TimedOrders(np.split(of_actions, walk.program.columns.bounds[1:-1]), int(ends.max()))
