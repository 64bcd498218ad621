"""One move: actions go some places earlier or later in their rank's order; for the compiled loops."""

from megatron_pp_ext.compiler.search.tables import Integers, Tables
from megatron_pp_ext.compiler.search.timed_order import TimedOrder
from megatron_pp_ext.schedule.loops import part_of_loop

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
