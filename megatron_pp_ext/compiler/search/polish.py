"""Critical-path polish: shorten a finished order by moving single actions (job-shop local search).

The makespan is the length of a chain of actions, each of which starts the moment the one before it
ends or its message arrives.  Only a change to that chain can shorten the schedule, so a move takes
an action of it and puts it a few places earlier or later in its rank's order (the neighbourhood of
Nowicki and Smutnicki, Management Science 42(6), 1996, with longer moves).  Where a move breaks the
memory limit, W are pulled forward to make room.  The obstacle may also be a forward that is not on
the chain but fills memory, so one move in four takes any action of the rank.

A move that does not change the makespan is kept, and now and then also one that makes it a little longer:
orders of equal length form plateaus, and the way to a shorter one often leads across them.
"""

from bisect import bisect_left
from random import Random

from megatron_pp_ext.compiler.search.integer_timing import TimedOrders, retime_orders, time_orders
from megatron_pp_ext.compiler.search.problem import Orders, Problem

_DISTANCES = (-6, -4, -3, -2, -1, -1, 1, 1, 2, 3, 4, 6)
_IDLE = 10_000
"""The number of moves without a shorter schedule after which the walk goes back to the best."""

_REPAIRS = 3
"""The number of W that may be pulled forward to mend one move."""


def polish(
    problem: Problem, orders: Orders, moves: int, random: Random, *, worse: int, floor: int = 0
) -> tuple[int, Orders]:
    """Return the shortest makespan met in ``moves`` moves from ``orders``, and its orders.

    For split backwards only.  One in ``worse`` moves may lengthen the schedule, by less than half an action.
    The walk stays within two actions of the best, goes back to it when it has found nothing for long, and
    ends when the makespan is ``floor``.
    """
    tick = max(problem.duration[: problem.stations])
    current = list(orders)
    now = time_orders(problem, current)
    if now is None:
        raise ValueError("orders to polish wait for each other: polish only what has run")
    best, best_orders, best_run = now.makespan, list(current), now
    path = critical_path(problem, current, now, random)
    idle = 0
    for _ in range(moves):
        if best <= floor:
            break
        idle += 1
        if idle > _IDLE:
            idle = 0
            current, now = list(best_orders), best_run
            path = critical_path(problem, current, now, random)
        rank, at = path[random.randrange(len(path))]
        order = current[rank]
        if random.randrange(4) == 0:
            at = random.randrange(len(order))
        to = at + random.choice(_DISTANCES)
        if not 0 <= to < len(order) or order[at] == order[to]:
            continue
        moved = list(order)
        moved.insert(to, moved.pop(at))
        changed = _mended(problem, moved, problem.limits[rank])
        if changed is None:
            continue
        current[rank] = changed
        first = min(at, to)
        since = now.starts[rank][first - 1] + problem.duration[order[first - 1]] if first else 0
        new = retime_orders(problem, current, now, since)
        more = 0 if random.randrange(worse) else 1 + random.randrange(max(1, tick // 2))
        if new is None or new.makespan > min(now.makespan + more, best + 2 * tick):
            current[rank] = order
            continue
        now = new
        path = critical_path(problem, current, now, random)
        if now.makespan < best:
            best, best_orders, best_run = now.makespan, list(current), now
            idle = 0
    return best, best_orders


def critical_path(
    problem: Problem, orders: Orders, timed: TimedOrders, random: Random
) -> list[tuple[int, int]]:
    """One chain of (rank, place in its order) without idle time, from the last end back to the first start.

    Where an action was held up by two others alike, either is followed.
    """
    stations, duration, delay, home = problem.stations, problem.duration, problem.delay, problem.home
    rank = random.choice([r for r, end in enumerate(timed.ends) if end == timed.makespan])
    at = len(orders[rank]) - 1
    path = []
    while True:
        path.append((rank, at))
        start = timed.starts[rank][at]
        code = orders[rank][at]
        before = at > 0 and timed.starts[rank][at - 1] + duration[orders[rank][at - 1]] == start
        if 0 < code < stations and not (before and random.randrange(2)):
            microbatch = bisect_left(timed.arrived[code + 1], start + duration[code] + delay[code])
            if timed.arrived[code][microbatch] == start:
                sent = start - delay[code - 1] - duration[code - 1]
                rank = home[code - 1]
                at = bisect_left(timed.starts[rank], sent)
                continue
        if not before:
            return path
        at -= 1


def _mended(problem: Problem, order: list[int], limit: int) -> list[int] | None:
    """Pull W forward in ``order``, in place, until the memory limit holds, and return it.

    Return None if that does not help, or if a W precedes its I.
    """
    taken, freed, stations = problem.taken, problem.freed, problem.stations
    for repair in range(_REPAIRS + 1):
        live = 0
        pending = [0] * (2 * stations)
        broken = -1
        for at, code in enumerate(order):
            live += taken[code]
            if live > limit:
                broken = at
                break
            live -= freed[code]
            if code >= stations:
                if pending[code] == 0:
                    return None
                pending[code] -= 1
            elif code >= problem.placement.stages:
                pending[2 * stations - 1 - code] += 1
        if broken < 0:
            return order
        if repair == _REPAIRS:
            break
        for at in range(broken + 1, len(order)):
            if order[at] >= stations and pending[order[at]]:
                order.insert(broken, order.pop(at))
                break
        else:
            break
    return None
