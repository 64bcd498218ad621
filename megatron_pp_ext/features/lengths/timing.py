"""How long a step takes with an order of its microbatches: the loops that a plan repeats.

The rules are those of ``schedule.timing``.  In addition, a rank does a W where it would wait for an input for
long enough, or has to before a forward (``steps.Weights``), and what is left of them at its end.
"""

import numpy as np

from megatron_pp_ext.features.lengths.steps import Floats, Integers, Memory, OrderSteps, Table
from megatron_pp_ext.schedule.loops import Loop, part_of_loop

WARMTH = 0.003
"""The part of a step by which a change may make it longer at first."""

EXCESS = 100.0
"""How much longer a step counts for each part by which a rank is above its limit."""

ROUNDING = 1e-9
"""The part of a limit by which sums may be above it."""


@part_of_loop
def timed(
    steps: OrderSteps, table: Table, order: Integers, patience: float, ends: Floats, done: Integers
) -> float:
    """Return the end of the last action, and fill ``ends`` of steps.

    A W is put into a hole that is as long as its part ``patience``: with 1 it never delays what follows.
    ``done[step]`` are the W that the rank has done before the step, and those at the end are left out.
    """
    before, sends, wire, rank, row, slot, other_row, other_slot, weights = steps
    bounds, weight_row, weight_slot, ready, due = weights
    seconds, _, delays, pair = table
    latest = 0.0
    finished = bounds[:-1].copy()
    ended = np.zeros(len(finished))
    for step in range(1, len(before)):
        start, mine = ends[before[step]], rank[step]
        arrival = ends[sends[step]] + delays[wire[step]] if sends[step] else 0.0
        took = seconds[row[step], order[slot[step]]]
        if other_row[step] >= 0:
            other = seconds[other_row[step], order[other_slot[step]]]
            took = max(pair * (took + other), took, other)
        if ready[step]:
            first = bounds[mine]
            at = finished[mine]
            while at < first + due[step]:
                start += seconds[weight_row[at], order[weight_slot[at]]]
                at += 1
            while at < first + ready[step]:
                length = seconds[weight_row[at], order[weight_slot[at]]]
                if start + patience * length > arrival:
                    break
                start += length
                at += 1
            finished[mine] = at
            done[step] = at - first
        if arrival > start:
            start = arrival
        ends[step] = start + took
        latest = max(latest, ends[step])
        if mine >= 0:
            ended[mine] = ends[step]
    for mine in range(len(finished)):
        end = ended[mine]
        for at in range(finished[mine], bounds[mine + 1]):
            end += seconds[weight_row[at], order[weight_slot[at]]]
        latest = max(latest, end)
    return latest


@part_of_loop
def drawn(state: Integers, end: int) -> int:
    """Return the next of a row of random numbers below ``end``, the same on every machine."""
    state[0] = (state[0] * 1103515245 + 12345) % 2147483648
    return (state[0] >> 8) % end


@part_of_loop
def changed(order: Integers, new: Integers, state: Integers) -> None:
    """Fill ``new`` with ``order`` after a change.

    Two microbatches change places, or one moves, or a stretch of the order is reversed.
    """
    count = len(order)
    first, last, way = drawn(state, count), drawn(state, count), drawn(state, 20)
    new[:] = order
    if way < 12:
        new[first], new[last] = order[last], order[first]
    elif way < 17:
        step = 1 if first < last else -1
        for place in range(first, last, step):
            new[place] = order[place + step]
        new[last] = order[first]
    else:
        first, last = min(first, last), max(first, last)
        for place in range(first, last + 1):
            new[place] = order[first + last - place]


@part_of_loop
def excess(memory: Memory, limits: Floats, table: Table, order: Integers) -> float:
    """Return by which part of its limit the fullest rank is above it; 0 where all keep theirs."""
    bounds, row, slot = memory
    most = 0.0
    for rank in range(len(limits)):
        live = peak = 0.0
        for action in range(bounds[rank], bounds[rank + 1]):
            live += table.kept[row[action], order[slot[action]]]
            peak = max(peak, live)
        most = max(most, peak / limits[rank] - 1)
    return most if most > ROUNDING else 0.0


@part_of_loop
def judged(
    steps: OrderSteps,
    table: Table,
    memory: Memory,
    limits: Floats,
    order: Integers,
    ends: Floats,
    done: Integers,
) -> float:
    """Return how long a step takes with ``order``, and much longer if a rank is above its limit."""
    took = timed(steps, table, order, 1.0, ends, done)
    if len(limits):
        took *= 1 + EXCESS * excess(memory, limits, table, order)
    return took


@Loop
def time_order(
    steps: OrderSteps, table: Table, order: Integers, patience: float, ends: Floats, done: Integers
) -> float:
    """Run ``timed`` as a compiled loop that Python can call."""
    return timed(steps, table, order, patience, ends, done)


@Loop
def judge(
    steps: OrderSteps,
    table: Table,
    memory: Memory,
    limits: Floats,
    order: Integers,
    ends: Floats,
    done: Integers,
) -> float:
    """Run ``judged`` as a compiled loop that Python can call."""
    return judged(steps, table, memory, limits, order, ends, done)


@Loop
def excess_of(memory: Memory, limits: Floats, table: Table, order: Integers) -> float:
    """Run ``excess`` as a compiled loop that Python can call."""
    return excess(memory, limits, table, order)


@Loop
def search(
    steps: OrderSteps,
    table: Table,
    memory: Memory,
    limits: Floats,
    order: Integers,
    trials: int,
    state: Integers,
    ends: Floats,
    done: Integers,
) -> float:
    """Try ``trials`` changes of ``order``, and leave the best one in it; return how long its step takes.

    At first a change that makes the step longer by up to ``WARMTH`` of it may stay, and ever less from then
    on: simulated annealing, with a threshold in place of chance.
    """
    now, new = order.copy(), order.copy()
    length = best = judged(steps, table, memory, limits, now, ends, done)
    warmth = WARMTH * length
    for trial in range(trials):
        changed(now, new, state)
        cooled = (trials - trial) / trials
        allowed = length + warmth * cooled * cooled * drawn(state, 1024) / 1024
        took = judged(steps, table, memory, limits, new, ends, done)
        if took <= allowed:
            length = took
            now[:] = new
            if took < best:
                best = took
                order[:] = new
    return best
