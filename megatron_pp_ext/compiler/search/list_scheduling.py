"""Event-driven list scheduling: simulate the pipeline, and let each free rank start its most urgent action.

Urgency follows from a building block's timetable (arXiv 2405.15362, section 2): station x of microbatch j
is due at ``due[x]`` plus the sum of the first j ``gaps``.  The timetable gives priorities, not times: an
action starts when its input is there, the rank is free and memory has room.

Two rules keep the memory limit.  A rank never keeps more than its limit.  And the microbatches that have
not done their last forward on a rank leave room for the oldest of them to do all of its own, so that the
oldest microbatch of the pipeline can always continue and the simulation never gets stuck.  For two equal
chunks and a limit of M that means "at most M - 1 forwards ahead of their second leg".
"""

from dataclasses import dataclass
from heapq import heappop, heappush

from megatron_pp_ext.compiler.search.problem import NEVER, Orders, Problem


@dataclass(frozen=True, slots=True)
class Knobs:
    """The parameters of a list schedule; times are in the problem's integer units.

    The first microbatch is due at station x at ``due[x]``, and microbatch j + 1 is due ``gaps[j]`` after
    microbatch j.  W of a stage is due ``weight_delay`` after its I.  A rank starts no action that is due more
    than ``slack`` later than its most urgent one, whether that one has its input or not.  It waits up to
    ``patience`` for a more urgent action instead of starting a forward or an input gradient, and up to
    ``weight_patience`` instead of starting a W.  With ``makes_room``, a rank does a W first when memory holds
    back a forward that is more urgent than all that it could do, and whose input is there by the end of
    the W.
    """

    due: tuple[int, ...]
    gaps: tuple[int, ...]
    weight_delay: int
    slack: int
    patience: int
    weight_patience: int
    makes_room: bool


def list_schedule(problem: Problem, knobs: Knobs, longest: int = NEVER) -> tuple[int, Orders] | None:
    """Return the makespan and the orders of the list schedule that ``knobs`` describe.

    Return None if it gets stuck, and as soon as a rank has been idle for too long to end by ``longest``.
    """
    ranks = problem.placement.ranks
    stages = problem.placement.stages
    stations, microbatches = problem.stations, problem.microbatches
    duration, delay, home = problem.duration, problem.delay, problem.home
    taken, freed, limits = problem.taken, problem.freed, problem.limits
    gaps, slack = knobs.gaps, knobs.slack
    patience, weight_patience, weight_delay = knobs.patience, knobs.weight_patience, knobs.weight_delay
    makes_room = knobs.makes_room
    own, forwards = problem.stations_by_rank, problem.forwards_by_rank

    due = list(knobs.due)
    done = [0] * (stations + 1)
    arrived: list[list[int]] = [[] for _ in range(stations + 1)]
    arrived[0] = [0] * microbatches
    pending: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    next_pending = [0] * ranks
    live = [0] * ranks
    free_at = [0] * ranks
    spare = [longest - work for work in problem.work]
    waiting = [False] * ranks
    orders: Orders = [[] for _ in range(ranks)]
    # An event is (time, rank) in one integer; ties go to the lower rank.
    events = list(range(ranks))
    while events:
        now, rank = divmod(heappop(events), ranks)
        if free_at[rank] > now:
            continue
        waiting[rank] = False
        queue = pending[rank]
        has_weight = next_pending[rank] < len(queue)
        weight_due, next_weight = queue[next_pending[rank]] if has_weight else (NEVER, -1)

        best, best_due = -1, NEVER
        first_due = blocked_due = wake = NEVER
        coming: list[tuple[int, int]] = []
        for station in own[rank]:
            count = done[station]
            if count == microbatches:
                continue
            at = due[station]
            inputs = arrived[station]
            if count >= len(inputs):
                if at < first_due:
                    first_due = at
                continue
            if station < stages:
                if live[rank] + taken[station] > limits[rank]:
                    if at < blocked_due and has_weight and inputs[count] <= now + duration[next_weight]:
                        blocked_due = at
                    continue
                oldest = done[forwards[rank][-1]]
                if count > oldest:
                    ahead = 0
                    for chunk in forwards[rank]:
                        behind = done[chunk] - oldest + (chunk == station)
                        ahead += taken[chunk] * behind if behind > 1 else taken[chunk]
                    if ahead > limits[rank]:
                        continue
            if at < first_due:
                first_due = at
            arrival = inputs[count]
            if arrival <= now:
                if at < best_due:
                    best, best_due = station, at
            else:
                coming.append((arrival, at))
                if arrival < wake:
                    wake = arrival
        if best >= 0 and best_due > first_due + slack:
            best, best_due = -1, NEVER
        if has_weight:
            if makes_room and blocked_due < best_due:
                best, best_due = next_weight, blocked_due
            elif weight_due < best_due:
                best, best_due = next_weight, weight_due
        if best >= 0 and coming:
            # Something more urgent may be on its way: is it worth waiting for?
            latest = now + min(duration[best] - 1, patience if best < stations else weight_patience)
            for arrival, at in coming:
                if arrival <= latest and at < best_due:
                    best = -1
                    break
        if best < 0:
            waiting[rank] = True
            if wake < NEVER:
                heappush(events, wake * ranks + rank)
            continue

        spare[rank] -= now - free_at[rank]
        if spare[rank] < 0:
            return None
        end = now + duration[best]
        orders[rank].append(best)
        free_at[rank] = end
        live[rank] += taken[best] - freed[best]
        heappush(events, end * ranks + rank)
        if best >= stations:
            next_pending[rank] += 1
            continue
        done[best] += 1
        if best >= stages:
            queue.append((due[best] + weight_delay, problem.weight_of(best)))
        due[best] += gaps[done[best] - 1]
        after = best + 1
        arrival = end + delay[best]
        arrived[after].append(arrival)
        if after < stations and waiting[home[after]]:
            heappush(events, arrival * ranks + home[after])
    complete = all(count == microbatches for count in done[:-1])
    return (max(free_at), orders) if complete else None
