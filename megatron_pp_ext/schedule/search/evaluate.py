"""How long is an order?  The compiler's inner loop: ``simulate`` on integers, without the names."""

from megatron_pp_ext.schedule.search.problem import Orders, Problem


def makespan(problem: Problem, orders: Orders) -> int | None:
    """First start to last end in integer time units; None when the ranks wait for each other.

    The first action of a schedule is F of stage 0 at time 0.  Memory is not looked at (see
    ``Problem.fits``), nor is W before its I.
    """
    ends = run(problem, orders)
    return None if ends is None else max(ends)


def run(problem: Problem, orders: Orders) -> list[int] | None:
    """The time at which each rank ends, or None for a deadlock."""
    stations = problem.stations
    whole = stations + problem.placement.stages
    duration, delay, home = problem.duration, problem.delay, problem.home
    arrived: list[list[int]] = [[] for _ in range(stations + 1)]
    arrived[0] = [0] * problem.microbatches
    following = [0] * stations
    waits_for = [-1] * len(orders)
    position = [0] * len(orders)
    clock = [0] * len(orders)
    left = sum(map(len, orders))
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        order = orders[rank]
        now = clock[rank]
        start_at = position[rank]
        at = start_at
        waits_for[rank] = -1
        for at in range(start_at, len(order)):
            code = order[at]
            if stations <= code < whole:
                now += duration[code]
                continue
            station = code if code < stations else stations - 1 - (code - whole)
            inputs = arrived[station]
            count = following[station]
            if count >= len(inputs):
                waits_for[rank] = station
                break
            if inputs[count] > now:
                now = inputs[count]
            following[station] = count + 1
            now += duration[code]
            arrived[station + 1].append(now + delay[station])
            if station + 1 < stations:
                neighbour = home[station + 1]
                if waits_for[neighbour] == station + 1:
                    waits_for[neighbour] = -2
                    runnable.append(neighbour)
        else:
            at = len(order)
        left -= at - start_at
        position[rank] = at
        clock[rank] = now
    return clock if left == 0 else None
