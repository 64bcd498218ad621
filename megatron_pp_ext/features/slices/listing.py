"""List scheduling of units of unlike cost within what each rank may keep.

Whenever a rank is free it does the action that can start first: an input gradient rather than a forward,
and a weight gradient where it would wait otherwise, or where a forward has no memory.

A *reservation* keeps ranks from waiting for each other.  Chains end in the order in which they begin, so a
rank takes a forward only if each chain that it has not done all forwards of would still fit once those
before it are done.  Then the oldest chain can always go on, on all ranks, and no order gets stuck as long as
each chain alone fits.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.schedule.loops import Loop

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

ROUNDING = 1e-9
"""The part of a limit by which sums may be above it."""

FORWARD, INPUT, WEIGHT = range(3)
"""The codes of the kinds of actions; a whole backward is an ``INPUT``."""


class Work(NamedTuple):
    """What stages do with units: ``seconds[kind, stage, unit]``, and what their activations are.

    ``kept[stage, unit]`` is kept from the start of F, ``released`` the part of it that the end of I gives
    back; W gives back the rest.  Where backwards are whole, I has the seconds of both, gives all back, and
    ``splits`` is 0.  ``delays[stage]`` are the seconds of a message between the stage and the next.
    """

    seconds: Floats
    kept: Floats
    released: Floats
    delays: Floats
    splits: int


class Where(NamedTuple):
    """``rank_of[stage]``, and the stages of each rank, the first one in column 0."""

    rank_of: Integers
    stages_of: Integers


class Chains(NamedTuple):
    """``chain_of[unit]``, counted in the order in which they stand, and the units in the order of their I."""

    chain_of: Integers
    backwards: Integers


class Policy(NamedTuple):
    """What a rank prefers.

    It fills a hole with a W if the hole is known to be at least ``patience`` of it.  Where a forward and an
    input gradient can both start it takes the forward as long as it keeps less than ``fill`` of its limit.
    """

    patience: float
    fill: float


@Loop
def listed(
    work: Work, where: Where, chains: Chains, limits: Floats, policy: Policy, order: Integers, peak: Floats
) -> float:
    """Return when the last action ends; infinite where a chain alone does not fit.

    Fills ``order[rank]`` with actions in their order, as ``(kind * stages + stage) * units + unit``, and
    ``peak`` with what each rank keeps at most.
    """
    seconds, kept, released, delays, splits = work
    rank_of, stages_of = where
    chain_of, backwards = chains
    patience, fill = policy
    stages, units = kept.shape
    ranks, chunks = stages_of.shape
    count = chain_of[-1] + 1
    forward_end, input_end = np.full((stages, units), np.inf), np.full((stages, units), np.inf)
    forwards, inputs = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    free, live, filled = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks, np.int64)
    # The weight gradients that wait, and what chains keep and have yet to keep on each rank.
    queue, head, tail = np.zeros((ranks, chunks * units), np.int64), np.zeros(ranks, np.int64), filled.copy()
    held, to_come = np.zeros((ranks, count)), np.zeros((ranks, count))
    oldest, newest = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    left = np.zeros((ranks, count), np.int64)
    for stage in range(stages):
        for unit in range(units):
            left[rank_of[stage], chain_of[unit]] += 1
            to_come[rank_of[stage], chain_of[unit]] += kept[stage, unit]
    room = limits * (1 + ROUNDING)
    for rank in range(ranks):
        if to_come[rank].max() > room[rank]:
            return np.inf
    start, kind_of, stage_of = np.full(ranks, np.inf), filled.copy(), filled.copy()
    is_new = np.ones(ranks, np.int64)
    last = 0.0
    for _ in range(stages * units * (2 + splits)):
        for rank in range(ranks):
            if not is_new[rank]:
                continue
            is_new[rank] = 0
            best_i, stage_i, best_f, stage_f, is_blocked = np.inf, -1, np.inf, -1, False
            for at in range(chunks - 1, -1, -1):
                stage = stages_of[rank, at]
                if inputs[stage] < units:
                    unit = backwards[inputs[stage]]
                    if stage == stages - 1:
                        ready = forward_end[stage, unit]
                    else:
                        ready = input_end[stage + 1, unit] + delays[stage]
                    ready = max(ready, free[rank])
                    if ready < best_i:
                        best_i, stage_i = ready, stage
                if forwards[stage] < units:
                    unit = forwards[stage]
                    ready = free[rank]
                    if stage:
                        ready = max(ready, forward_end[stage - 1, unit] + delays[stage - 1])
                    if ready >= best_f:
                        continue
                    amount, chain = kept[stage, unit], chain_of[unit]
                    fits = live[rank] + amount <= room[rank]
                    behind = 0.0
                    for other in range(max(newest[rank], chain), oldest[rank] - 1, -1):
                        behind += held[rank, other]
                        if other < chain and left[rank, other]:
                            fits = fits and behind + amount + to_come[rank, other] <= room[rank]
                        elif other == chain:
                            fits = fits and behind + to_come[rank, other] <= room[rank]
                    if fits:
                        best_f, stage_f = ready, stage
                    elif ready <= free[rank]:
                        is_blocked = True
            takes_forward = best_f < best_i or (
                best_f == best_i and live[rank] < fill * limits[rank] and stage_f >= 0
            )
            if takes_forward:
                start[rank], kind_of[rank], stage_of[rank] = best_f, FORWARD, stage_f
            else:
                start[rank], kind_of[rank], stage_of[rank] = best_i, INPUT, stage_i
            if head[rank] < tail[rank]:
                code = queue[rank, head[rank]]
                hole = start[rank] - free[rank]
                needed = patience * seconds[WEIGHT, code // units, code % units]
                if hole > 0 and (hole >= needed or is_blocked):
                    start[rank], kind_of[rank] = free[rank], WEIGHT
        rank = 0
        for other in range(1, ranks):
            if start[other] < start[rank]:
                rank = other
        if start[rank] == np.inf:
            return np.inf
        kind, stage, begin = kind_of[rank], stage_of[rank], start[rank]
        if kind == WEIGHT:
            stage, unit = queue[rank, head[rank]] // units, queue[rank, head[rank]] % units
            head[rank] += 1
        elif kind == INPUT:
            unit = backwards[inputs[stage]]
        else:
            unit = forwards[stage]
        end = begin + seconds[kind, stage, unit]
        chain = chain_of[unit]
        if kind == FORWARD:
            forward_end[stage, unit] = end
            forwards[stage] += 1
            amount = kept[stage, unit]
            live[rank] += amount
            peak[rank] = max(peak[rank], live[rank])
            to_come[rank, chain] -= amount
            newest[rank] = max(newest[rank], chain)
            left[rank, chain] -= 1
            if stage < stages - 1:
                is_new[rank_of[stage + 1]] = 1
        elif kind == INPUT:
            input_end[stage, unit] = end
            inputs[stage] += 1
            amount = released[stage, unit]
            if splits:
                queue[rank, tail[rank]] = stage * units + unit
                tail[rank] += 1
            if stage:
                is_new[rank_of[stage - 1]] = 1
        else:
            amount = kept[stage, unit] - released[stage, unit]
        if kind == FORWARD:
            held[rank, chain] += amount
        else:
            held[rank, chain] -= amount
            live[rank] -= amount
        while oldest[rank] < count - 1 and not left[rank, oldest[rank]]:
            oldest[rank] += 1
        free[rank] = end
        is_new[rank] = 1
        last = max(last, end)
        order[rank, filled[rank]] = (kind * stages + stage) * units + unit
        filled[rank] += 1
    return last
