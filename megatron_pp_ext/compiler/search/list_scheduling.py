"""Event-driven list scheduling: simulate the pipeline, and let each free rank start its most urgent action.

Urgency follows from a building block's timetable (arXiv 2405.15362, section 2): station x of microbatch j
is due at ``due[x]`` plus the sum of the first j ``gaps``.  The timetable gives priorities, not times: an
action starts when its input is there, the rank is free and the memory suffices.

Three rules keep the memory limit.  A rank never keeps more than its limit; an input gradient that would, as
it keeps more than its forward did, comes after W that wait.  A forward leaves memory for the input gradient
that takes most, as it will be once all W that wait have run: so every input gradient can run at last.  And
the microbatches that have not done their last forward on a rank leave memory for the oldest of them to do all
of its own.  So the oldest microbatch of the pipeline can always continue, and the simulation never gets stuck
where the limit holds one microbatch and the largest such input gradient.  For two equal chunks and a limit of
M the last rule means "at most M - 1 forwards ahead of their second leg".
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.compiler.search.problem import NEVER, Orders, Problem
from megatron_pp_ext.compiler.search.tables import CODE, Integers, Tables, tables
from megatron_pp_ext.schedule.loops import Loop


class DueRules(NamedTuple):
    """How a list schedule follows a timetable.

    W of a stage is due ``weight_delay`` after its I.  A rank starts no action that is due more than ``slack``
    later than its most urgent one, whether that one has its input or not.  It waits up to ``patience`` for a
    more urgent action instead of starting a forward or an input gradient, and up to ``weight_patience``
    instead of starting a W.  With ``frees_memory``, a rank does a W first when memory holds back an action
    that is more urgent than all that it could do, and whose input is there by the end of the W.
    """

    weight_delay: int
    slack: int
    patience: int
    weight_patience: int
    frees_memory: bool


class Knobs(NamedTuple):
    """The parameters of a list schedule; times are in the problem's integer units.

    The first microbatch is due at station x at ``due[x]``, and microbatch j + 1 is due ``gaps[j]`` after
    microbatch j.
    """

    due: tuple[int, ...]
    gaps: tuple[int, ...]
    rules: DueRules


def list_schedule(problem: Problem, knobs: Knobs) -> tuple[int, Orders] | None:
    """Return the makespan and the orders of the list schedule that ``knobs`` describe.

    Return None if it gets stuck.
    """
    length, orders = _list_schedule(problem, knobs, NEVER)
    return None if length < 0 else (length, orders.tolist())


def list_makespan(problem: Problem, knobs: Knobs, longest: int) -> int | None:
    """Return the makespan of ``list_schedule``, and None as soon as it cannot end by ``longest``."""
    length, _ = _list_schedule(problem, knobs, longest)
    return None if length < 0 else length


def _list_schedule(problem: Problem, knobs: Knobs, longest: int) -> tuple[int, NDArray[np.int32]]:
    actions = 3 * problem.placement.chunks * problem.microbatches
    orders = np.empty((problem.placement.ranks, actions), CODE)
    length = _schedule(
        tables(problem),
        orders,
        longest - np.array(problem.work),
        np.array(knobs.due),
        np.array(knobs.gaps),
        *knobs.rules,
    )
    return length, orders


@Loop
def _schedule(
    tables: Tables,
    orders: NDArray[np.int32],
    spare: Integers,
    due: Integers,
    gaps: Integers,
    weight_delay: int,
    slack: int,
    patience: int,
    weight_patience: int,
    frees_memory: bool,
) -> int:
    """Fill ``orders`` (ranks, actions of each) and return the makespan, or -1 where there is none.

    ``spare`` is the time that each rank may be idle; ``due`` moves on with every microbatch.
    """
    stages, microbatches = tables.stages, tables.microbatches
    duration, delay, home = tables.duration, tables.delay, tables.home
    kept, growth, limits, stations_by_rank = tables.kept, tables.growth, tables.limits, tables.own
    ranks, actions = orders.shape
    stations = 2 * stages
    chunks = stations_by_rank.shape[1] // 2

    done = np.zeros(stations, np.int64)
    # How many inputs each station was sent, when they arrive, and those that a rank still waits for.
    sent = np.zeros(stations, np.int64)
    sent[0] = microbatches
    arrived = np.zeros((stations, microbatches), np.int64)
    coming = np.empty(2 * chunks, np.int64)
    # W that wait, in the order of their I: when they are due, and their codes.
    weight_dues = np.empty((ranks, chunks * microbatches), np.int64)
    weights = np.empty((ranks, chunks * microbatches), np.int64)
    weights_known = np.zeros(ranks, np.int64)
    weights_done = np.zeros(ranks, np.int64)
    live = np.zeros(ranks, np.int64)
    # What each rank would keep if all W that wait had run, and the most that an input gradient of it takes.
    after_weights = np.zeros(ranks, np.int64)
    largest = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        for station in stations_by_rank[rank, chunks:]:
            largest[rank] = max(largest[rank], growth[station])
    free_at = np.zeros(ranks, np.int64)
    started = np.zeros(ranks, np.int64)
    waiting = np.zeros(ranks, np.bool_)
    # When each rank next decides; ties go to the lower rank.
    decides = np.zeros(ranks, np.int64)
    makespan = 0
    remaining = ranks * actions
    while remaining:
        rank = 0
        for other in range(1, ranks):
            if decides[other] < decides[rank]:
                rank = other
        now = decides[rank]
        if now == NEVER:
            return -1
        decides[rank] = NEVER
        waiting[rank] = False
        has_weight = weights_done[rank] < weights_known[rank]
        weight_due, next_weight = NEVER, -1
        if has_weight:
            weight_due, next_weight = weight_dues[rank, weights_done[rank]], weights[rank, weights_done[rank]]

        best, best_due = -1, NEVER
        first_due, blocked_due, wake, expected = NEVER, NEVER, NEVER, 0
        for station in stations_by_rank[rank]:
            count = done[station]
            if count == microbatches:
                continue
            at = due[station]
            if count >= sent[station]:
                first_due = min(first_due, at)
                continue
            arrival = arrived[station, count]
            if live[rank] + growth[station] > limits[rank]:
                if has_weight and arrival <= now + duration[next_weight]:
                    blocked_due = min(blocked_due, at)
                continue
            if station < stages:
                if after_weights[rank] + kept[station] + largest[rank] > limits[rank]:
                    continue
                oldest = done[stations_by_rank[rank, chunks - 1]]
                if count > oldest:
                    ahead = 0
                    for chunk in stations_by_rank[rank, :chunks]:
                        after = done[chunk] - oldest + (1 if chunk == station else 0)
                        ahead += kept[chunk] * max(1, after)
                    if ahead + largest[rank] > limits[rank]:
                        continue
            first_due = min(first_due, at)
            if arrival > now:
                coming[expected] = station
                expected += 1
                wake = min(wake, arrival)
            elif at < best_due:
                best, best_due = station, at
        if best >= 0 and best_due > first_due + slack:
            best, best_due = -1, NEVER
        if has_weight:
            if frees_memory and blocked_due < best_due:
                best, best_due = next_weight, blocked_due
            elif weight_due < best_due:
                best, best_due = next_weight, weight_due
        if best >= 0:
            # Something more urgent may be on its way: is it worth waiting for?
            latest = now + min(duration[best] - 1, patience if best < stations else weight_patience)
            for station in coming[:expected]:
                if arrived[station, done[station]] <= latest and due[station] < best_due:
                    best = -1
                    break
        if best < 0:
            waiting[rank] = True
            decides[rank] = wake
            continue

        spare[rank] -= now - free_at[rank]
        if spare[rank] < 0:
            return -1
        end = now + duration[best]
        orders[rank, started[rank]] = best
        started[rank] += 1
        remaining -= 1
        makespan = max(makespan, end)
        free_at[rank] = end
        live[rank] += kept[best]
        decides[rank] = end
        if best >= stations:
            weights_done[rank] += 1
            continue
        microbatch = done[best]
        done[best] += 1
        after_weights[rank] += kept[best] if best < stages else -kept[stations - 1 - best]
        if best >= stages:
            weight_dues[rank, weights_known[rank]] = due[best] + weight_delay
            weights[rank, weights_known[rank]] = 2 * stations - 1 - best
            weights_known[rank] += 1
        due[best] += gaps[microbatch]
        after = best + 1
        if after < stations:
            arrival = end + delay[best]
            arrived[after, microbatch] = arrival
            sent[after] += 1
            if waiting[home[after]]:
                decides[home[after]] = min(decides[home[after]], arrival)
    return makespan
