"""Shorten a finished order by rebuilding one stretch of it after another (large neighbourhood search)."""

from random import Random

from megatron_pp_ext.compiler.search.beam_search import Window
from megatron_pp_ext.compiler.search.integer_timing import time_orders
from megatron_pp_ext.compiler.search.problem import Orders, Problem

_SIZES = range(24, 320)
"""The approximate number of actions in a window."""

_WIDTHS = (10, 20, 40, 80)


def rebuild(problem: Problem, orders: Orders, effort: int, random: Random, floor: int) -> tuple[int, Orders]:
    """Return the makespan and orders after searches in windows at random places (split backwards only).

    Orders of equal length replace the ones before, and the next window starts from them.  ``effort`` bounds
    the number of partial orders that are visited; the walk ends when the makespan is ``floor``.
    """
    timed = time_orders(problem, orders)
    if timed is None:
        raise ValueError("orders to rebuild wait for each other: rebuild only what has run")
    while effort > 0 and timed.makespan > floor:
        size = random.choice(_SIZES)
        since = random.randrange(-size // 2, problem.size - size // 2)
        begin, end = (timed.makespan * place // problem.size for place in (since, since + size))
        window = Window(problem, orders, timed, begin, end + 1)
        found = window.search(random.choice(_WIDTHS), timed.makespan + 1, random)
        effort -= window.visited + problem.size // 8
        again = None if found is None else time_orders(problem, found)
        if found is not None and again is not None:
            orders, timed = found, again
    return timed.makespan, orders
