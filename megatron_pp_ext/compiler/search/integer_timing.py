"""Time orders in whole numbers, on which every machine agrees."""

from typing import NamedTuple

import numpy as np

from megatron_pp_ext.compiler.search.problem import Orders, Problem
from megatron_pp_ext.compiler.search.tables import Integers
from megatron_pp_ext.schedule.walk import Walk


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
