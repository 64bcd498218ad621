"""An order of split backwards with its times, which follow moves of single actions; for compiled loops."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.compiler.search.problem import Orders, Problem
from megatron_pp_ext.compiler.search.tables import Heap, Integers, Tables, heap_of, pop, push, tables
from megatron_pp_ext.schedule.loops import Loop, part_of_loop


class TimedOrder(NamedTuple):
    """An order (ranks, actions of each), with the times and memory of every action.

    An action starts at ``start``, and from there it is ``tail`` to the end of all that waits for it, its own
    duration included.  It is at ``place`` in its rank's order.  ``live[r]`` is the memory that rank r keeps
    before every place.  ``trial`` has the starts that a move leads to; between moves it equals ``start``.

    ``heap`` has the actions to time anew.  ``changed`` lists those whose time a move has changed, and
    ``listed`` has for each whether it is there.

    An action is a number: its code times the number of microbatches, plus its microbatch.
    """

    order: Integers
    start: Integers
    tail: Integers
    place: Integers
    live: Integers
    trial: Integers
    heap: Heap
    changed: Integers
    listed: NDArray[np.bool_]


def timed_order(problem: Problem, orders: Orders, starts: Sequence[Integers]) -> TimedOrder:
    """Return ``orders`` with their ``starts``."""
    codes = np.array(orders, np.int64)
    ranks, actions = codes.shape
    numbers = np.empty((ranks, actions), np.int64)
    for row, new in zip(codes, numbers, strict=True):
        # Every code comes up once for each microbatch.
        by_code = np.argsort(row, kind="stable")
        new[by_code] = row[by_code] * problem.microbatches + np.arange(actions) % problem.microbatches
    start = np.empty(codes.size, np.int64)
    start[numbers.ravel()] = np.concatenate(starts)
    state = TimedOrder(
        numbers,
        start,
        np.zeros(codes.size, np.int64),
        np.empty(codes.size, np.int64),
        np.zeros((ranks, actions + 1), np.int64),
        start.copy(),
        heap_of(codes.size),
        np.empty(codes.size, np.int64),
        np.zeros(codes.size, np.bool_),
    )
    _fill(tables(problem), state, np.argsort(-start, kind="stable"))
    return state


@Loop
def _fill(tables: Tables, state: TimedOrder, latest_first: Integers) -> None:
    """Enter what follows from the order and its starts."""
    for rank in range(len(state.order)):
        _note(tables, state, rank, 0, state.order.shape[1])
    for action in latest_first:
        state.tail[action] = _tail(tables, state, action)


@part_of_loop
def _note(tables: Tables, state: TimedOrder, rank: int, first: int, last: int) -> None:
    """Note the places from ``first`` to ``last`` of ``rank``, and the memory before each."""
    for place in range(first, last):
        action = state.order[rank, place]
        code = action // tables.microbatches
        state.place[action] = place
        state.live[rank, place + 1] = state.live[rank, place] + tables.kept[code]


@part_of_loop
def ends(tables: Tables, state: TimedOrder) -> tuple[int, int]:
    """Return the latest end of a rank, and the sum of all, by the starts of the trial."""
    latest = total = 0
    for action in state.order[:, -1]:
        end = state.trial[action] + tables.duration[action // tables.microbatches]
        latest = max(latest, end)
        total += end
    return latest, total


@part_of_loop
def _ready(tables: Tables, state: TimedOrder, action: int, before: int) -> int:
    """Return when ``action`` can start on a rank that is free at ``before``, by the starts of the trial."""
    code = action // tables.microbatches
    if 0 < code < 2 * tables.stages:
        sent = state.trial[action - tables.microbatches] + tables.duration[code - 1]
        return max(before, sent + tables.delay[code - 1])
    return before


@part_of_loop
def _free(tables: Tables, state: TimedOrder, rank: int, place: int) -> int:
    """Return the end of the action of ``rank`` before ``place``, by the starts of the trial."""
    if place == 0:
        return 0
    before = state.order[rank, place - 1]
    return state.trial[before] + tables.duration[before // tables.microbatches]


@part_of_loop
def _tail(tables: Tables, state: TimedOrder, action: int) -> int:
    """Return the time from the start of ``action`` to the end of all after it, by their tails."""
    code = action // tables.microbatches
    row, place = state.order[tables.home[code]], state.place[action]
    longest = state.tail[row[place + 1]] if place + 1 < len(row) else 0
    if code < 2 * tables.stages - 1:
        longest = max(longest, tables.delay[code] + state.tail[action + tables.microbatches])
    return longest + tables.duration[code]


@part_of_loop
def estimate(tables: Tables, state: TimedOrder, rank: int, new: Integers, first: int, last: int) -> int:
    """Return about how long the longest chain through ``new``, at ``first`` to ``last``, becomes."""
    m, row = tables.microbatches, state.order[rank]
    now = _free(tables, state, rank, first)
    for action in new[first:last]:
        now = state.trial[action] = _ready(tables, state, action, now)
        now += tables.duration[action // m]
    tail = state.tail[row[last]] if last < len(row) else 0
    longest = 0
    for place in range(last - 1, first - 1, -1):
        action = new[place]
        code = action // m
        if code < 2 * tables.stages - 1:
            tail = max(tail, tables.delay[code] + state.tail[action + m])
        tail += tables.duration[code]
        longest = max(longest, state.trial[action] + tail)
    for action in new[first:last]:
        state.trial[action] = state.start[action]
    return longest


@part_of_loop
def try_move(
    tables: Tables, state: TimedOrder, rank: int, new: Integers, first: int, last: int, longest: int
) -> tuple[int, bool]:
    """Exchange places ``first`` to ``last`` of ``rank`` with the same places of ``new``, and time the trial.

    Return how many actions ``changed`` then lists, and whether a makespan of ``longest`` is still possible.
    """
    cut = state.start[state.order[rank, last - 1]]
    _exchange(state, rank, new, first, last)
    return _forward(tables, state, rank, first, last, cut, longest)


@part_of_loop
def undo_move(state: TimedOrder, rank: int, new: Integers, first: int, last: int, changed: int) -> None:
    """Take back what ``try_move`` did, which ``changed`` so many actions."""
    _exchange(state, rank, new, first, last)
    for action in state.changed[:changed]:
        state.trial[action] = state.start[action]


@part_of_loop
def keep_move(tables: Tables, state: TimedOrder, rank: int, first: int, last: int, changed: int) -> None:
    """Enter all that follows from ``try_move``, which ``changed`` so many actions."""
    for action in state.changed[:changed]:
        state.start[action] = state.trial[action]
    _note(tables, state, rank, first, last)
    _backward(tables, state, rank, first, last)


@part_of_loop
def _exchange(state: TimedOrder, rank: int, new: Integers, first: int, last: int) -> None:
    for place in range(first, last):
        action = new[place]
        new[place] = state.order[rank, place]
        state.order[rank, place] = action
        state.place[action] = place


@part_of_loop
def _forward(
    tables: Tables, state: TimedOrder, rank: int, first: int, last: int, cut: int, longest: int
) -> tuple[int, bool]:
    """Put into ``trial`` the starts that change with the places ``first`` to ``last`` of ``rank``.

    Return how many actions ``changed`` then lists, and whether a makespan of ``longest`` is still possible.
    An action that started later than ``cut`` has nothing after it that changed places, so that its tail
    holds.  Where ranks wait for each other, their actions start ever later.

    Where the output of a station goes is written out: functions for it make the moves a quarter slower.
    """
    row, heap = state.order[rank], state.heap
    changed = size = 0
    free = _free(tables, state, rank, first)
    for action in row[first:last]:
        now = _ready(tables, state, action, free)
        free = now + tables.duration[action // tables.microbatches]
        if now != state.trial[action]:
            changed = _change(state, changed, action, now)
            if action // tables.microbatches < 2 * tables.stages - 1:
                after = action + tables.microbatches
                size = push(heap, size, state.start[after], after)
    if last < len(row):
        size = push(heap, size, state.start[row[last]], row[last])
    possible = True
    while size and possible:
        action = pop(heap, size)
        size -= 1
        code = action // tables.microbatches
        home, place = tables.home[code], state.place[action]
        now = _ready(tables, state, action, _free(tables, state, home, place))
        if now == state.trial[action]:
            continue
        changed = _change(state, changed, action, now)
        tail = state.tail[action] if state.start[action] > cut else 0
        possible = now + tail <= longest
        if place + 1 < state.order.shape[1]:
            after = state.order[home, place + 1]
            size = push(heap, size, state.start[after], after)
        if code < 2 * tables.stages - 1:
            after = action + tables.microbatches
            size = push(heap, size, state.start[after], after)
    while size:
        pop(heap, size)
        size -= 1
    for action in state.changed[:changed]:
        state.listed[action] = False
    return changed, possible


@part_of_loop
def _change(state: TimedOrder, changed: int, action: int, start: int) -> int:
    """Enter the new ``start`` of ``action``; return how many actions have changed."""
    state.trial[action] = start
    if state.listed[action]:
        return changed
    state.listed[action] = True
    state.changed[changed] = action
    return changed + 1


@part_of_loop
def _backward(tables: Tables, state: TimedOrder, rank: int, first: int, last: int) -> None:
    """Renew the tails that change with the places ``first`` to ``last`` of ``rank``."""
    row, heap = state.order[rank], state.heap
    size = 0
    for place in range(last - 1, first - 2, -1):
        if place >= 0:
            size = push(heap, size, -state.start[row[place]], row[place])
    while size:
        action = pop(heap, size)
        size -= 1
        tail = _tail(tables, state, action)
        if tail == state.tail[action]:
            continue
        state.tail[action] = tail
        code = action // tables.microbatches
        if state.place[action]:
            before = state.order[tables.home[code], state.place[action] - 1]
            size = push(heap, size, -state.start[before], before)
        if 0 < code < 2 * tables.stages:
            before = action - tables.microbatches
            size = push(heap, size, -state.start[before], before)


_REPAIRS = 3
"""The number of W that may be pulled forward to repair one move."""

_REACH = 64
"""How far such a W may be."""


@part_of_loop
def rearranged(
    tables: Tables, state: TimedOrder, rank: int, at: int, width: int, steps: int, new: Integers
) -> tuple[int, int]:
    """Write into ``new`` the order of ``rank`` in which ``width`` actions from ``at`` on go ``steps`` places.

    The move ends where it would pass what has to stay before or after.  W are pulled forward where the limit
    is broken.  Return the first place that changes and the one after the last; equal ones mean that there is
    none, or that the limit cannot be kept.
    """
    row = state.order[rank]
    width = min(width, len(row) - at)
    steps = _possible(tables, row, at, width, steps)
    if steps == 0:
        return at, at
    first, last = min(at, at + steps), max(at, at + steps) + width
    for place in range(at, at + width):
        new[place + steps] = row[place]
    # The actions that are passed go the other way.
    for place in range(first, at):
        new[place + width] = row[place]
    for place in range(at + width, last):
        new[place - width] = row[place]
    live = state.live[rank, first]
    place, repairs = first, 0
    while place < last:
        code = new[place] // tables.microbatches
        if live + tables.growth[code] > tables.limits[rank]:
            pulled = -1 if repairs == _REPAIRS else _weight(tables, state, rank, new, first, place, last)
            if pulled < 0:
                return first, first
            while last <= pulled:
                new[last] = row[last]
                last += 1
            weight = new[pulled]
            for later in range(pulled, place, -1):
                new[later] = new[later - 1]
            new[place] = weight
            code = weight // tables.microbatches
            repairs += 1
        live += tables.kept[code]
        place += 1
    return first, last


@part_of_loop
def _possible(tables: Tables, row: Integers, at: int, width: int, steps: int) -> int:
    """Return how many of ``steps`` places, which are negative on the way forward, the actions may go."""
    step = 1 if steps > 0 else -1
    done = 0
    while done != steps:
        place = at + width + done if steps > 0 else at - 1 + done
        if not 0 <= place < len(row):
            break
        for moved in row[at : at + width]:
            if _has_to_stay(tables, moved, row[place]):
                return done
        done += step
    return done


@part_of_loop
def _has_to_stay(tables: Tables, first: int, second: int) -> bool:
    """Whether two actions of a rank have a fixed order: equal stage and kind, or the same microbatch.

    A W has to stay after its I only.
    """
    m = tables.microbatches
    if first // m == second // m:
        return True
    if first % m != second % m:
        return False
    are_stations = first < 2 * tables.stages * m and second < 2 * tables.stages * m
    return are_stations or second == _partner(tables, first)


@part_of_loop
def _partner(tables: Tables, action: int) -> int:
    """Return the W of an I, the I of a W, and -1 for a forward."""
    code = action // tables.microbatches
    # The codes of the two add up to this; their microbatches are the same.
    code_sum = 4 * tables.stages - 1
    return action + (code_sum - 2 * code) * tables.microbatches if code >= tables.stages else -1


@part_of_loop
def _weight(
    tables: Tables, state: TimedOrder, rank: int, new: Integers, first: int, place: int, last: int
) -> int:
    """Return where the next W after ``place`` is whose I is before it; -1 where none is near.

    ``new`` has the places from ``first`` to ``last``.
    """
    row = state.order[rank]
    for later in range(place + 1, min(place + _REACH, len(row))):
        action = new[later] if later < last else row[later]
        if action // tables.microbatches < 2 * tables.stages:
            continue
        gradient = _partner(tables, action)
        if state.place[gradient] < first:
            return later
        for earlier in new[first:place]:
            if earlier == gradient:
                return later
    return -1
