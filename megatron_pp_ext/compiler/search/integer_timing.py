"""Time orders in whole numbers: the searches' inner loop, which ``schedule.timing`` would be too slow for."""

from bisect import bisect_left
from dataclasses import dataclass

from megatron_pp_ext.compiler.search.problem import Orders, Problem, Table


@dataclass(frozen=True, slots=True)
class TimedOrders:
    """Orders with their times, in integer time units.

    ``starts[r]`` are the starts of rank r's actions, ``ends[r]`` is the end of its last one, and
    ``arrived[x]`` are the times at which the inputs of the microbatches reached station x.
    """

    starts: list[list[int]]
    ends: list[int]
    arrived: list[list[int]]

    @property
    def makespan(self) -> int:
        """The time from the first start, that of F of stage 0 at time 0, to the last end."""
        return max(self.ends)


def time_orders(problem: Problem, orders: Orders) -> TimedOrders | None:
    """Time ``orders``; None when the ranks wait for each other.

    Neither memory (see ``Problem.fits``) nor that a W follows its I is checked.
    """
    arrived: list[list[int]] = [[] for _ in range(problem.stations + 1)]
    arrived[0] = [0] * problem.microbatches
    starts: list[list[int]] = [[] for _ in orders]
    return _go_on(problem, orders, starts, [0] * len(orders), arrived, [0] * problem.stations)


def retime_orders(problem: Problem, orders: Orders, before: TimedOrders, since: int) -> TimedOrders | None:
    """Time ``orders`` like ``time_orders``, from ``since`` on.

    All actions that start earlier must be those of ``before``.  For split backwards only.
    """
    duration, delay = problem.duration, problem.delay
    starts = [started[: bisect_left(started, since)] for started in before.starts]
    ends = [
        started[-1] + duration[order[len(started) - 1]] if started else 0
        for started, order in zip(starts, orders, strict=True)
    ]
    arrived = [before.arrived[0]]
    following = []
    for station in range(problem.stations):
        times = before.arrived[station + 1]
        count = bisect_left(times, since + duration[station] + delay[station])
        following.append(count)
        arrived.append(times[:count])
    return _go_on(problem, orders, starts, ends, arrived, following)


def _go_on(
    problem: Problem,
    orders: Orders,
    starts: list[list[int]],
    ends: list[int],
    arrived: list[list[int]],
    following: list[int],
) -> TimedOrders | None:
    """Continue from where each rank is; ``following`` counts the microbatches that each station has done."""
    stations = problem.stations
    whole = stations + problem.placement.stages
    duration, delay, home = problem.duration, problem.delay, problem.home
    waits_for = [-1] * len(orders)
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        order = orders[rank]
        started = starts[rank]
        now = ends[rank]
        waits_for[rank] = -1
        for at in range(len(started), len(order)):
            code = order[at]
            if stations <= code < whole:
                started.append(now)
                now += duration[code]
                continue
            # A whole backward waits for what its I would wait for, and delivers it.
            station = code if code < stations else stations - 1 - (code - whole)
            inputs = arrived[station]
            count = following[station]
            if count >= len(inputs):
                waits_for[rank] = station
                break
            if inputs[count] > now:
                now = inputs[count]
            following[station] = count + 1
            started.append(now)
            now += duration[code]
            after = station + 1
            arrived[after].append(now + delay[station])
            if after < stations and waits_for[home[after]] == after:
                waits_for[home[after]] = -1
                runnable.append(home[after])
        ends[rank] = now
    if any(len(started) < len(order) for started, order in zip(starts, orders, strict=True)):
        return None
    return TimedOrders(starts, ends, arrived)


def times_to_end(problem: Problem, orders: Orders, timed: TimedOrders) -> Table:
    """Return, for every code and microbatch, the time from its start to the end of all that waits for it.

    For split backwards only.
    """
    rest = [[0] * problem.microbatches for _ in range(problem.stations + problem.placement.stages)]
    to_come = [problem.microbatches] * len(rest)
    then = [0] * len(orders)
    latest_first = sorted(
        (
            (start, rank, code)
            for rank, (order, starts) in enumerate(zip(orders, timed.starts, strict=True))
            for start, code in zip(starts, order, strict=True)
        ),
        reverse=True,
    )
    for _, rank, code in latest_first:
        to_come[code] -= 1
        microbatch = to_come[code]
        if code < problem.stations - 1:
            then[rank] = max(then[rank], problem.delay[code] + rest[code + 1][microbatch])
        then[rank] += problem.duration[code]
        rest[code][microbatch] = then[rank]
    return rest
