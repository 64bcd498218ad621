"""How long is an order?  The searches' inner loop: ``simulate`` on integers, without the names."""

from bisect import bisect_left
from dataclasses import dataclass

from megatron_pp_ext.compiler.search.problem import Orders, Problem


@dataclass(frozen=True, slots=True)
class Run:
    """An order with its clock, in integer time units.

    ``starts[r]`` are the starts of rank r's actions, ``ends[r]`` is the end of its last one and
    ``arrived[x]`` when the input of each microbatch reached station x.
    """

    starts: list[list[int]]
    ends: list[int]
    arrived: list[list[int]]

    @property
    def makespan(self) -> int:
        """First start to last end; the first start is F of stage 0 at time 0."""
        return max(self.ends)


def run(problem: Problem, orders: Orders) -> Run | None:
    """Run ``orders`` on paper; None when the ranks wait for each other.

    Memory is not looked at (see ``Problem.fits``), nor is W before its I.
    """
    arrived: list[list[int]] = [[] for _ in range(problem.stations + 1)]
    arrived[0] = [0] * problem.microbatches
    starts: list[list[int]] = [[] for _ in orders]
    return _go_on(problem, orders, starts, [0] * len(orders), arrived, [0] * problem.stations)


def rerun(problem: Problem, orders: Orders, before: Run, since: int) -> Run | None:
    """``run`` for orders that are those of ``before`` in all actions that start earlier than ``since``.

    For split backwards only.
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
) -> Run | None:
    """Run from where each rank is; ``following`` counts what each station has done."""
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
    return Run(starts, ends, arrived)
