"""Karmarkar and Karp's largest differencing: numbers into parts whose sums are nearly equal.

The two sets of parts whose sums differ most are put together, the largest part of one with the smallest of
the other, until one set is left ("The differencing method of set partitioning", 1982; for more than two parts
Korf, Artificial Intelligence 106, 1998).  Where there are many numbers, the smallest then fill up what the
others have left uneven: each goes to the smallest part.
"""

import heapq
from collections.abc import Sequence
from itertools import count

Part = tuple[float, int, list[int]]
"""The sum of a part, how many numbers it has, and their places."""

_DIFFERENCED = 6
"""For how many numbers of each part sets are put together, which takes time for each number and part."""


def partition(numbers: Sequence[float], parts: int, *, equal_sizes: bool = False) -> list[list[int]]:
    """Return the places of ``numbers`` in so many parts, none of which is empty.

    Numbers are 0 or more.  With ``equal_sizes`` all parts have as many numbers.  Raises ValueError for fewer
    numbers than parts and, with ``equal_sizes``, for a number of them that ``parts`` does not divide.
    """
    if not 0 < parts <= len(numbers):
        raise ValueError(
            f"{len(numbers)} numbers cannot fill {parts} parts: give more numbers or fewer parts"
        )
    if equal_sizes and len(numbers) % parts:
        raise ValueError(
            f"{len(numbers)} numbers are not the same number for each of {parts} parts: give a multiple"
        )
    falling = sorted(range(len(numbers)), key=lambda place: -numbers[place])
    size = parts if equal_sizes else 1
    largest = len(falling) if equal_sizes else _DIFFERENCED * parts
    falling, small = falling[:largest], falling[largest:]
    tie = count()
    heap: list[tuple[float, int, list[Part]]] = []

    def add(found: list[Part]) -> None:
        found.sort(reverse=True)
        heapq.heappush(heap, (found[-1][0] - found[0][0], next(tie), found))

    for first in range(0, len(falling), size):
        own: list[Part] = [(numbers[place], 1, [place]) for place in falling[first : first + size]]
        add(own + [(0.0, 0, []) for _ in range(parts - len(own))])
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(one, reversed(other), strict=True)
        add([(a + b, n + m, some + more) for (a, n, some), (b, m, more) in pairs])
    found = heap[0][2]
    heapq.heapify(found)
    for place in small:
        total, size, places = found[0]
        places.append(place)
        heapq.heapreplace(found, (total + numbers[place], size + 1, places))
    return [sorted(places) for *_, places in found]
