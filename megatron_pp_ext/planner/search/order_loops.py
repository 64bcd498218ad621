"""The loops over all actions of a schedule that a search repeats most often, which numba compiles.

``follow`` does what ``schedule.timing.ScheduleTimer`` does when it is made, ``time`` and ``critical`` what
its methods do with costs, and ``most_buffers`` what the function of ``schedule.messages`` does; the same
additions in the same order give the same numbers.  Steps, wires and places of durations are those of
``ScheduleTimer``, and there is a wire more: ``OWN`` leads from a rank's own S to the backward of the last
stage, and takes time only where messages are planned.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.compiler.search.loops import Loop, part_of_loop
from megatron_pp_ext.planner.step.action_arrays import B, F, I, S, T, W

Whole = NDArray[np.int64]
Floats = NDArray[np.float64]

HOP, HIDDEN, SUMS, OWN = range(4)
"""The wires: between stages, to a rank's part of a shared vocabulary, from all of these, and from the own."""

_SCORES, _NO_WORK, _PAIRS = 0, 2, 3
"""Places behind those of the stages' durations: S (with T behind it), no work, and the first pair."""


@Loop
def follow(
    stage: Whole,
    kind: Whole,
    microbatch: Whole,
    is_first: NDArray[np.bool_],
    bounds: Whole,
    home: Whole,
    microbatches: int,
    shares: bool,
) -> tuple[NDArray[np.int32], NDArray[np.int32], Whole]:
    """Let all ranks run without a clock; return their steps, the step of every action, and the pairs.

    The steps are rows of (step before on the rank, step that sends the input, wire, place of the duration),
    counted from 1, each behind those that it waits for.  ``is_first`` marks the forward of a pair.  A pair is
    a row of the places of its two durations.  No steps are returned where ranks wait for each other.
    """
    ranks, stages, count = len(bounds) - 1, len(home), len(stage)
    last = stages - 1
    size = stages * microbatches
    behind = 4 * stages
    # The step that delivered the F, I, W, S or T of a stage and a microbatch; 0 until then.
    done = np.zeros(5 * size, np.int64)
    inputs = np.empty(4 + ranks, np.int64)
    steps = np.zeros((1 + count + (microbatches * (ranks + 2) if shares else 0), 4), np.int32)
    step_of = np.zeros(count, np.int32)
    place_of_pair = np.zeros((stages, behind), np.int64)
    pairs = np.zeros((stages * stages, 2), np.int64)
    filled, paired = 0, 0
    at, latest = bounds[:-1].copy(), np.zeros(ranks, np.int64)
    waits_for, since, tickets = np.full(ranks, -1), np.zeros(ranks, np.int64), 0
    runnable, able = np.empty(ranks * 3, np.int64), ranks
    runnable[:ranks] = np.arange(ranks)
    while able:
        able -= 1
        rank = runnable[able]
        while at[rank] < bounds[rank + 1]:
            first = at[rank]
            behind_them = first + (2 if is_first[first] else 1)
            found = 0
            ends_of_first = 0
            for a in range(first, behind_them):
                found = _inputs(
                    stage[a], kind[a], microbatch[a], last, microbatches, ranks, shares, inputs, found
                )
                if a == first:
                    ends_of_first = found
            missing = -1
            for i in range(found):
                if not done[inputs[i]]:
                    missing = inputs[i]
                    break
            if missing >= 0:
                waits_for[rank], since[rank] = missing, tickets
                tickets += 1
                break
            before, sender, wire = latest[rank], 0, HOP
            for i in range(found):
                a = first if i < ends_of_first else first + 1
                source = inputs[i] % size // microbatches
                is_scores = inputs[i] // size == 3
                over = HOP
                if kind[a] == S:
                    over = HIDDEN
                elif shares and stage[a] == last and (kind[a] == I or kind[a] == B):
                    over = SUMS
                if home[source] == rank:
                    if not (over == SUMS and is_scores):
                        continue
                    over = OWN
                if sender:
                    filled += 1
                    steps[filled, 0], steps[filled, 1] = before, sender
                    steps[filled, 2], steps[filled, 3] = wire, behind + _NO_WORK
                    before = filled
                sender, wire = done[inputs[i]], over
            place = 4 * stage[first] + kind[first] if kind[first] < S else behind + _SCORES + kind[first] - S
            if behind_them - first == 2:
                second = 4 * stage[first + 1] + kind[first + 1]
                if not place_of_pair[stage[first], second]:
                    pairs[paired, 0], pairs[paired, 1] = place, second
                    place_of_pair[stage[first], second] = behind + _PAIRS + paired
                    paired += 1
                place = place_of_pair[stage[first], second]
            filled += 1
            steps[filled, 0], steps[filled, 1] = before, sender
            steps[filled, 2], steps[filled, 3] = wire, place
            latest[rank] = filled
            at[rank] = behind_them
            for a in range(first, behind_them):
                step_of[a] = filled
                delivered = _slot(kind[a], stage[a], microbatch[a], size, microbatches)
                done[delivered] = filled
                able = _woken(delivered, waits_for, since, runnable, able)
    if (at < bounds[1:]).any():
        filled = 0
    return steps[: filled + 1], step_of, pairs[:paired]


@part_of_loop
def _slot(kind: int, stage: int, microbatch: int, size: int, microbatches: int) -> int:
    """Return the number of what an action delivers, where a whole backward stands for its I."""
    row = kind if kind < B else I if kind == B else kind - 1
    # Kinds are numbers of eight bits, with which numpy, unlike numba, would go on where nothing is compiled.
    return np.int64(row) * size + stage * microbatches + microbatch  # type: ignore[return-value]


@part_of_loop
def _inputs(
    stage: int,
    kind: int,
    microbatch: int,
    last: int,
    microbatches: int,
    ranks: int,
    shares: bool,
    found: Whole,
    count: int,
) -> int:
    """Put what an action needs (``schedule.actions.needs``) behind ``count`` others; return the new count."""
    size = (last + 1) * microbatches

    if kind == F:
        if stage > 0:
            found[count] = _slot(F, stage - 1, microbatch, size, microbatches)
            count += 1
        return count
    if kind == W:
        found[count] = _slot(I, stage, microbatch, size, microbatches)
        return count + 1
    if kind == S:
        found[count] = _slot(F, last, microbatch, size, microbatches)
        return count + 1
    if kind == T:
        found[count] = _slot(S, stage, microbatch, size, microbatches)
        found[count + 1] = _slot(I, last, microbatch, size, microbatches)
        return count + 2
    found[count] = _slot(F, stage, microbatch, size, microbatches)
    count += 1
    if stage < last:
        found[count] = _slot(I, stage + 1, microbatch, size, microbatches)
        count += 1
    elif shares:
        for rank in range(ranks):
            found[count] = _slot(S, rank, microbatch, size, microbatches)
            count += 1
    return count


@part_of_loop
def _woken(delivered: int, waits_for: Whole, since: Whole, runnable: Whole, able: int) -> int:
    """Put the ranks that waited for ``delivered`` on top of the ``able`` ones, the longest wait first."""
    bottom = able
    for rank in range(len(waits_for)):
        if waits_for[rank] == delivered:
            waits_for[rank] = -1
            place = able
            while place > bottom and since[runnable[place - 1]] > since[rank]:
                runnable[place] = runnable[place - 1]
                place -= 1
            runnable[place] = rank
            able += 1
    return able


@Loop
def time(steps: Whole, durations: Floats, wires: Floats) -> tuple[Floats, Floats]:
    """Return the starts and the ends of all steps; both are 0 at 0, which is no step."""
    starts, ends = np.zeros(len(steps)), np.zeros(len(steps))
    for step in range(1, len(steps)):
        start = ends[steps[step, 0]]
        if steps[step, 1]:
            start = max(start, ends[steps[step, 1]] + wires[steps[step, 2]])
        starts[step] = start
        ends[step] = start + durations[steps[step, 3]]
    return starts, ends


@Loop
def critical(steps: Whole, starts: Floats, ends: Floats, pairs: Whole, pair: float, places: int) -> Floats:
    """Return how often each duration is on the critical path; an action in a pair counts as ``pair``."""
    counts = np.zeros(places)
    alone = places - len(pairs)
    step = ends.argmax()
    while step:
        place = steps[step, 3]
        if place >= alone:
            for half in pairs[place - alone]:
                counts[half] += pair
        else:
            counts[place] += 1
        step = steps[step, 0] if ends[steps[step, 0]] == starts[step] else steps[step, 1]
    return counts


@Loop
def most_buffers(stage: Whole, kind: Whole, bounds: Whole, home: Whole, line: Whole, ahead: int) -> Whole:
    """Return the most message buffers of every rank, with the actions launched as they stand in ``line``."""
    ranks, last = len(bounds) - 1, len(home) - 1
    rank_of = np.empty(len(stage), np.int64)
    for rank in range(ranks):
        rank_of[bounds[rank] : bounds[rank + 1]] = rank
    # Rank r posts receives in front of each of its actions, and behind the last: at ``bounds[r] + r`` and on.
    posted = np.zeros(len(stage) + ranks, np.int64)
    launched, sent = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    for a in line:
        rank = rank_of[a]
        launched[rank] += 1
        receiver = rank
        if kind[a] == F and stage[a] < last:
            receiver = home[stage[a] + 1]
        elif (kind[a] == I or kind[a] == B) and stage[a] > 0:
            receiver = home[stage[a] - 1]
        if receiver != rank:
            posted[bounds[receiver] + receiver + launched[receiver]] += 1
            sent[rank] += 1
    most = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        waiting = 0
        for a in range(bounds[rank], bounds[rank + 1]):
            waiting += posted[a + rank]
            most[rank] = max(most[rank], waiting)
            if kind[a] == F and stage[a] > 0:
                waiting -= home[stage[a] - 1] != rank
            elif (kind[a] == I or kind[a] == B) and stage[a] < last:
                waiting -= home[stage[a] + 1] != rank
        most[rank] += min(sent[rank], ahead)
    return most
