"""List scheduling of units of unlike cost within what each rank may keep.

Whenever a rank is free it does the action that can start first: an input gradient rather than a forward,
and a weight gradient where it would wait otherwise.

A *reservation* keeps ranks from waiting for each other.  Chains end in the order in which they begin, so a
rank takes a forward only if each chain that it has not done all forwards of would still fit once those
before it are done.  Then the oldest chain can always go on, on all ranks, and no order gets stuck as long as
each chain alone fits.

*Gaps* keep ranks from filling their memory too soon.  Chains that enter the pipeline right after each other
go through it as one wave, and ranks wait until it comes back.  So the first stage may let time pass between
units, and between chains.
"""

import numpy as np

from megatron_pp_ext.features.slices.problem import (
    FORWARD,
    INPUT,
    WEIGHT,
    Chains,
    Entry,
    Integers,
    Problem,
    Ranks,
    State,
    Where,
)
from megatron_pp_ext.schedule.loops import part_of_loop


@part_of_loop
def listed(problem: Problem, entry: Entry, state: State, until: float, actions: Integers) -> float:
    """Return when the last action ends; infinite where that is known to be after ``until``.

    Fills ``actions[rank]`` with ``(kind * stages + stage) * units + place`` of each.
    """
    work, where, chains, ranks = problem
    stages, units = work.kept.shape
    count, chunks = where.stages_of.shape
    _begin(chains, entry, state)
    filled = np.zeros(count, np.int64)
    changed, changes = np.arange(count), count
    release = entered = last = 0.0
    for _ in range(stages * units * (2 + work.splits)):
        for at in range(changes):
            rank = changed[at]
            free = state.free[rank]
            best_i, stage_i, best_f, stage_f = np.inf, -1, np.inf, -1
            for chunk in range(chunks - 1, -1, -1):
                stage = where.stages_of[rank, chunk]
                done, place = state.inputs[stage], state.forwards[stage]
                if stage == stages - 1:
                    if done < units and state.back_at[done] < place:
                        ready = max(free, state.forward_ends[stage, state.back_at[done]])
                        if ready < best_i:
                            best_i, stage_i = ready, stage
                elif done < state.inputs[stage + 1]:
                    ready = max(free, state.input_ends[stage + 1, done] + work.delays[stage])
                    if ready < best_i:
                        best_i, stage_i = ready, stage
                if place == (state.forwards[stage - 1] if stage else units):
                    continue
                ready = max(free, release)
                if stage:
                    ready = max(free, state.forward_ends[stage - 1, place] + work.delays[stage - 1])
                if ready < best_f:
                    amount = work.kept[stage, state.unit_at[place]]
                    if _fits(ranks, state, rank, amount, state.chain_at[place]):
                        best_f, stage_f = ready, stage
            start, kind, stage = best_i, INPUT, stage_i
            if best_f < best_i:
                start, kind, stage = best_f, FORWARD, stage_f
            if start > free and state.head[rank] < state.tail[rank]:
                start, kind = free, WEIGHT
            state.start[rank], state.kind[rank], state.stage[rank] = start, kind, stage
        rank = 0
        for other in range(1, count):
            if state.start[other] < state.start[rank]:
                rank = other
        start, kind, stage = state.start[rank], state.kind[rank], state.stage[rank]
        if kind == FORWARD and stage == 0:
            entered, start = start, state.free[rank]  # in the step nothing waits for a gap
        state.idle[rank] += start - state.free[rank]
        if state.idle[rank] + ranks.seconds[rank] > until:
            return np.inf
        changed[0], changes = rank, 1
        if kind == FORWARD:
            place = state.forwards[stage]
            unit, chain = state.unit_at[place], state.chain_at[place]
            end = start + work.seconds[FORWARD, stage, unit]
            state.forward_ends[stage, place] = end
            state.forwards[stage] += 1
            _keep(where, state, rank, chain, work.kept[stage, unit])
            if stage < stages - 1:
                changed[1], changes = where.rank_of[stage + 1], 2
            if stage == 0:
                number = entry.order[chain]
                gap = entry.pace / chains.size[number]
                if place + 1 < units and state.chain_at[place + 1] != chain:
                    gap += entry.gaps[number]
                release = entered + gap * chains.seconds[number]
        elif kind == INPUT:
            done = state.inputs[stage]
            place = state.back_at[done]
            unit = state.unit_at[place]
            end = start + work.seconds[INPUT, stage, unit]
            state.input_ends[stage, done] = end
            state.inputs[stage] += 1
            _release(state, rank, state.chain_at[place], work.released[stage, unit])
            if work.splits:
                state.queue[rank, state.tail[rank]] = stage * units + place
                state.tail[rank] += 1
            if stage:
                changed[1], changes = where.rank_of[stage - 1], 2
        else:
            stage, place = divmod(state.queue[rank, state.head[rank]], units)
            unit = state.unit_at[place]
            state.head[rank] += 1
            end = start + work.seconds[WEIGHT, stage, unit]
            amount = work.kept[stage, unit] - work.released[stage, unit]
            _release(state, rank, state.chain_at[place], amount)
        state.free[rank] = end
        last = max(last, end)
        actions[rank, filled[rank]] = (kind * stages + stage) * units + place
        filled[rank] += 1
    return last


@part_of_loop
def _begin(chains: Chains, entry: Entry, state: State) -> None:
    """Let nothing be done yet, with the chains in their order."""
    place, ranks = 0, len(state.free)
    for at in range(len(entry.order)):
        chain = entry.order[at]
        size = chains.size[chain]
        for number in range(size):
            state.unit_at[place + number] = chains.first[chain] + number
            state.chain_at[place + number] = at
            state.back_at[place + number] = place + size - 1 - number
        place += size
        for rank in range(ranks):
            state.held[rank, at], state.to_come[rank, at] = 0.0, chains.kept[rank, chain]
    for stage in range(len(state.forwards)):
        state.forwards[stage] = state.inputs[stage] = 0
    for rank in range(ranks):
        state.free[rank] = state.idle[rank] = state.live[rank] = state.ended[rank] = 0.0
        state.oldest[rank] = state.head[rank] = state.tail[rank] = 0


@part_of_loop
def _fits(ranks: Ranks, state: State, rank: int, amount: float, chain: int) -> bool:
    """Whether a forward of ``chain`` that keeps ``amount`` leaves what the reservation is for."""
    limit = ranks.limits[rank]
    behind = state.live[rank] + amount
    if behind > limit:
        return False
    behind -= state.ended[rank]
    for other in range(state.oldest[rank], chain):
        if behind + ranks.largest[rank] <= limit:
            return True
        if behind + state.to_come[rank, other] > limit:
            return False
        behind -= state.held[rank, other]
    return behind + state.to_come[rank, chain] - amount <= limit


@part_of_loop
def _keep(where: Where, state: State, rank: int, chain: int, amount: float) -> None:
    """Count what a forward keeps, and the chains whose forwards the rank has all done with it."""
    state.live[rank] += amount
    state.held[rank, chain] += amount
    state.to_come[rank, chain] -= amount
    least = len(state.unit_at)
    for stage in where.stages_of[rank]:
        least = min(least, state.forwards[stage])
    first = state.chain_at[least] if least < len(state.unit_at) else state.held.shape[1]
    while state.oldest[rank] < first:
        state.ended[rank] += state.held[rank, state.oldest[rank]]
        state.oldest[rank] += 1


@part_of_loop
def _release(state: State, rank: int, chain: int, amount: float) -> None:
    """Count what a backward, or a half of it, gives back."""
    state.live[rank] -= amount
    state.held[rank, chain] -= amount
    if chain < state.oldest[rank]:
        state.ended[rank] -= amount
