"""An order of split backwards with its times, which follow single moves; for the compiled loops.

An action is a number here: its code times the number of microbatches, plus its microbatch.  Where the output
of a station goes is written out: functions for it make the moves a quarter slower.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.compiler.search.event_heap import Heap, heap_of, pop, push
from megatron_pp_ext.compiler.search.problem import Orders, Problem
from megatron_pp_ext.compiler.search.tables import Integers, Tables, tables
from megatron_pp_ext.schedule.loops import Loop, part_of_loop


class TimedOrder(NamedTuple):
    """An order (ranks, actions of each), with the times and memory of every action.

    An action starts at ``start``, and from there it is ``tail`` to the end of all that waits for it, its own
    duration included.  It is at ``place`` in its rank's order.  ``live[r]`` is the memory that rank r keeps
    before every place.  ``trial`` has the starts that a move leads to; between moves it equals ``start``.

    ``heap`` has the actions to time anew.  ``changed`` lists those whose time a move has changed, and
    ``listed`` has for each whether it is there.
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
    timed = TimedOrder(
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
    _fill(tables(problem), timed, np.argsort(-start, kind="stable"))
    return timed


@Loop
def _fill(tables: Tables, timed: TimedOrder, latest_first: Integers) -> None:
    """Enter what follows from the order and its starts."""
    for rank in range(len(timed.order)):
        _note(tables, timed, rank, 0, timed.order.shape[1])
    for action in latest_first:
        timed.tail[action] = _tail(tables, timed, action)


@part_of_loop
def _note(tables: Tables, timed: TimedOrder, rank: int, first: int, last: int) -> None:
    """Note the places from ``first`` to ``last`` of ``rank``, and the memory before each."""
    for place in range(first, last):
        action = timed.order[rank, place]
        code = action // tables.microbatches
        timed.place[action] = place
        timed.live[rank, place + 1] = timed.live[rank, place] + tables.kept[code]


@part_of_loop
def ends(tables: Tables, timed: TimedOrder) -> tuple[int, int]:
    """Return the latest end of a rank, and the sum of all, by the starts of the trial."""
    latest = total = 0
    for action in timed.order[:, -1]:
        end = timed.trial[action] + tables.duration[action // tables.microbatches]
        latest = max(latest, end)
        total += end
    return latest, total


@part_of_loop
def _ready(tables: Tables, timed: TimedOrder, action: int, before: int) -> int:
    """Return when ``action`` can start on a rank that is free at ``before``, by the starts of the trial."""
    code = action // tables.microbatches
    if 0 < code < 2 * tables.stages:
        sent = timed.trial[action - tables.microbatches] + tables.duration[code - 1]
        return max(before, sent + tables.delay[code - 1])
    return before


@part_of_loop
def _free(tables: Tables, timed: TimedOrder, rank: int, place: int) -> int:
    """Return the end of the action of ``rank`` before ``place``, by the starts of the trial."""
    if place == 0:
        return 0
    before = timed.order[rank, place - 1]
    return timed.trial[before] + tables.duration[before // tables.microbatches]


@part_of_loop
def _tail(tables: Tables, timed: TimedOrder, action: int) -> int:
    """Return the time from the start of ``action`` to the end of all after it, by their tails."""
    code = action // tables.microbatches
    row, place = timed.order[tables.home[code]], timed.place[action]
    longest = timed.tail[row[place + 1]] if place + 1 < len(row) else 0
    if code < 2 * tables.stages - 1:
        longest = max(longest, tables.delay[code] + timed.tail[action + tables.microbatches])
    return longest + tables.duration[code]


@part_of_loop
def estimate(tables: Tables, timed: TimedOrder, rank: int, new: Integers, first: int, last: int) -> int:
    """Return about how long the longest chain through ``new``, at ``first`` to ``last``, becomes."""
    m, row = tables.microbatches, timed.order[rank]
    now = _free(tables, timed, rank, first)
    for action in new[first:last]:
        now = timed.trial[action] = _ready(tables, timed, action, now)
        now += tables.duration[action // m]
    tail = timed.tail[row[last]] if last < len(row) else 0
    longest = 0
    for place in range(last - 1, first - 1, -1):
        action = new[place]
        code = action // m
        if code < 2 * tables.stages - 1:
            tail = max(tail, tables.delay[code] + timed.tail[action + m])
        tail += tables.duration[code]
        longest = max(longest, timed.trial[action] + tail)
    for action in new[first:last]:
        timed.trial[action] = timed.start[action]
    return longest


@part_of_loop
def try_move(
    tables: Tables, timed: TimedOrder, rank: int, new: Integers, first: int, last: int, longest: int
) -> tuple[int, bool]:
    """Exchange places ``first`` to ``last`` of ``rank`` with the same places of ``new``, and time the trial.

    Return how many actions ``changed`` then lists, and whether a makespan of ``longest`` is still possible.
    """
    cut = timed.start[timed.order[rank, last - 1]]
    _exchange(timed, rank, new, first, last)
    return _forward(tables, timed, rank, first, last, cut, longest)


@part_of_loop
def undo_move(timed: TimedOrder, rank: int, new: Integers, first: int, last: int, changed: int) -> None:
    """Take back what ``try_move`` did, which ``changed`` so many actions."""
    _exchange(timed, rank, new, first, last)
    for action in timed.changed[:changed]:
        timed.trial[action] = timed.start[action]


@part_of_loop
def keep_move(tables: Tables, timed: TimedOrder, rank: int, first: int, last: int, changed: int) -> None:
    """Enter all that follows from ``try_move``, which ``changed`` so many actions."""
    for action in timed.changed[:changed]:
        timed.start[action] = timed.trial[action]
    _note(tables, timed, rank, first, last)
    _backward(tables, timed, rank, first, last)


@part_of_loop
def _exchange(timed: TimedOrder, rank: int, new: Integers, first: int, last: int) -> None:
    for place in range(first, last):
        action = new[place]
        new[place] = timed.order[rank, place]
        timed.order[rank, place] = action
        timed.place[action] = place


@part_of_loop
def _forward(
    tables: Tables, timed: TimedOrder, rank: int, first: int, last: int, cut: int, longest: int
) -> tuple[int, bool]:
    """Put into ``trial`` the starts that change with the places ``first`` to ``last`` of ``rank``.

    Return how many actions ``changed`` then lists, and whether a makespan of ``longest`` is still possible.
    An action that started later than ``cut`` has nothing after it that changed places, so that its tail
    holds.  Where ranks wait for each other, their actions start ever later.
    """
    row, heap = timed.order[rank], timed.heap
    changed = waiting = 0
    free = _free(tables, timed, rank, first)
    for action in row[first:last]:
        now = _ready(tables, timed, action, free)
        free = now + tables.duration[action // tables.microbatches]
        if now != timed.trial[action]:
            changed = _change(timed, changed, action, now)
            if action // tables.microbatches < 2 * tables.stages - 1:
                after = action + tables.microbatches
                waiting = push(heap, waiting, timed.start[after], after)
    if last < len(row):
        waiting = push(heap, waiting, timed.start[row[last]], row[last])
    possible = True
    while waiting and possible:
        action = pop(heap, waiting)
        waiting -= 1
        code = action // tables.microbatches
        home, place = tables.home[code], timed.place[action]
        now = _ready(tables, timed, action, _free(tables, timed, home, place))
        if now == timed.trial[action]:
            continue
        changed = _change(timed, changed, action, now)
        tail = timed.tail[action] if timed.start[action] > cut else 0
        possible = now + tail <= longest
        if place + 1 < timed.order.shape[1]:
            after = timed.order[home, place + 1]
            waiting = push(heap, waiting, timed.start[after], after)
        if code < 2 * tables.stages - 1:
            after = action + tables.microbatches
            waiting = push(heap, waiting, timed.start[after], after)
    while waiting:
        pop(heap, waiting)
        waiting -= 1
    for action in timed.changed[:changed]:
        timed.listed[action] = False
    return changed, possible


@part_of_loop
def _change(timed: TimedOrder, changed: int, action: int, start: int) -> int:
    """Enter the new ``start`` of ``action``; return how many actions have changed."""
    timed.trial[action] = start
    if timed.listed[action]:
        return changed
    timed.listed[action] = True
    timed.changed[changed] = action
    return changed + 1


@part_of_loop
def _backward(tables: Tables, timed: TimedOrder, rank: int, first: int, last: int) -> None:
    """Renew the tails that change with the places ``first`` to ``last`` of ``rank``."""
    row, heap = timed.order[rank], timed.heap
    waiting = 0
    for place in range(last - 1, first - 2, -1):
        if place >= 0:
            waiting = push(heap, waiting, -timed.start[row[place]], row[place])
    while waiting:
        action = pop(heap, waiting)
        waiting -= 1
        tail = _tail(tables, timed, action)
        if tail == timed.tail[action]:
            continue
        timed.tail[action] = tail
        code = action // tables.microbatches
        if timed.place[action]:
            before = timed.order[tables.home[code], timed.place[action] - 1]
            waiting = push(heap, waiting, -timed.start[before], before)
        if 0 < code < 2 * tables.stages:
            before = action - tables.microbatches
            waiting = push(heap, waiting, -timed.start[before], before)
