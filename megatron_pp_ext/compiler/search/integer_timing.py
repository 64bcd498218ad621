"""Time orders in whole numbers; ``schedule.timing`` would be too slow for a search."""

from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.compiler.search.problem import Orders, Problem
from megatron_pp_ext.compiler.search.tables import CODE, Integers, Tables, tables
from megatron_pp_ext.schedule.loops import Loop


class TimedOrders(NamedTuple):
    """When each rank's actions start, in integer time units, and when the last of all ends.

    The first start, that of F of stage 0, is at time 0.
    """

    starts: list[Integers]
    makespan: int


def time_orders(problem: Problem, orders: Orders) -> TimedOrders | None:
    """Time ``orders``; None when the ranks wait for each other.

    Neither memory (see ``Problem.fits``) nor that a W follows its I is checked.
    """
    bounds = np.array([0, *accumulate(map(len, orders))])
    codes = np.concatenate([np.array(order, CODE) for order in orders])
    starts = np.empty(len(codes), np.int64)
    makespan = _time(tables(problem), codes, bounds, starts)
    return None if makespan < 0 else TimedOrders(np.split(starts, bounds[1:-1]), makespan)


@Loop
def _time(tables: Tables, codes: NDArray[np.int32], bounds: Integers, starts: Integers) -> int:
    """Fill ``starts`` and return the makespan, or -1 where the ranks wait for each other.

    Rank r has the ``codes`` from ``bounds[r]`` to ``bounds[r + 1]``.
    """
    stages, stations = tables.stages, 2 * tables.stages
    duration, delay, home = tables.duration, tables.delay, tables.home
    ranks = len(bounds) - 1
    arrived = np.zeros((stations + 1, tables.microbatches), np.int64)
    sent, taken = np.zeros(stations + 1, np.int64), np.zeros(stations, np.int64)
    sent[0] = tables.microbatches
    at, now = bounds.copy(), np.zeros(ranks, np.int64)
    waits_for, runnable = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    for rank in range(ranks):
        waits_for[rank], runnable[rank] = -1, rank
    able = ranks
    while able:
        able -= 1
        rank = runnable[able]
        while at[rank] < bounds[rank + 1]:
            code = codes[at[rank]]
            # A whole backward waits for what its I would wait for, and delivers it.
            station = code if code < stations else stations - 1 - (code - stations - stages)
            is_weight = stations <= code < stations + stages
            if not is_weight:
                if taken[station] >= sent[station]:
                    waits_for[rank] = station
                    break
                now[rank] = max(now[rank], arrived[station, taken[station]])
                taken[station] += 1
            starts[at[rank]] = now[rank]
            now[rank] += duration[code]
            at[rank] += 1
            if not is_weight:
                after = station + 1
                arrived[after, sent[after]] = now[rank] + delay[station]
                sent[after] += 1
                if after < stations and waits_for[home[after]] == after:
                    waits_for[home[after]] = -1
                    runnable[able] = home[after]
                    able += 1
    makespan = 0
    for rank in range(ranks):
        if at[rank] < bounds[rank + 1]:
            return -1
        makespan = max(makespan, now[rank])
    return makespan
