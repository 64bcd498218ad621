"""A heap of actions by time, without an action twice; for the compiled loops.

With ``heapq``, whose lists each move would make anew, the moves take about a tenth longer.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.compiler.search.tables import Integers
from megatron_pp_ext.schedule.loops import part_of_loop


class Heap(NamedTuple):
    """Room for every action; ``waits`` is whether an action is in the heap.

    An item is a time multiplied by the number of actions, plus an action.
    """

    items: Integers
    waits: NDArray[np.bool_]


def heap_of(count: int) -> Heap:
    """Return an empty heap for actions from 0 to ``count`` - 1."""
    return Heap(np.empty(count, np.int64), np.zeros(count, np.bool_))


@part_of_loop
def push(heap: Heap, size: int, time: int, action: int) -> int:
    """Add ``action`` to the ``size`` actions of the heap unless it is among them; return the new size."""
    if heap.waits[action]:
        return size
    heap.waits[action] = True
    items, at = heap.items, size
    item = time * len(items) + action
    while at and items[(at - 1) >> 1] > item:
        items[at] = items[(at - 1) >> 1]
        at = (at - 1) >> 1
    items[at] = item
    return size + 1


@part_of_loop
def pop(heap: Heap, size: int) -> int:
    """Take the action of the least time, of equal ones the first, from the ``size`` of the heap."""
    items = heap.items
    action = items[0] % len(items)
    heap.waits[action] = False
    item = items[size - 1]
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size - 1:
            break
        if below + 1 < size - 1 and items[below + 1] < items[below]:
            below += 1
        if items[below] >= item:
            break
        items[at] = items[below]
        at = below
    items[at] = item
    return action
