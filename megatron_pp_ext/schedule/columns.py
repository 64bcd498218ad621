"""Columns of numbers: lists for work that is done once, arrays for compiled loops (``loops``)."""

from collections.abc import Iterable
from itertools import chain, repeat
from typing import Any

type Column = Any
"""A list of numbers, or an array of them."""


class Lists:
    """Makes columns that are lists."""

    def of(self, values: Iterable[float], kind: type = int) -> Column:
        """Return a column of ``values`` of this ``kind``, int or float."""
        return list(values)

    def zeros(self, count: int, kind: type = int) -> Column:
        """Return a column of so many zeros."""
        return [kind(0)] * count

    def repeated(self, values: Iterable[int], times: Iterable[int]) -> Column:
        """Return a column with each of ``values`` so many ``times``."""
        return list(chain.from_iterable(map(repeat, values, times)))

    def taken(self, values: Column, places: Column) -> Column:
        """Return the ``values`` at ``places``."""
        return [values[place] for place in places]

    def order(self, values: Column) -> Column:
        """Return the places of ``values`` by their size; equal ones stay in their order."""
        return sorted(range(len(values)), key=values.__getitem__)


class Arrays(Lists):
    """Makes columns that are arrays."""

    def __init__(self) -> None:
        import numpy  # which takes a while, and a single schedule needs none

        self._numpy = numpy

    def of(self, values: Iterable[float], kind: type = int) -> Column:
        """Return a column of ``values`` of this ``kind``, int or float."""
        return self._numpy.fromiter(values, kind)

    def zeros(self, count: int, kind: type = int) -> Column:
        """Return a column of so many zeros."""
        return self._numpy.zeros(count, kind)

    def repeated(self, values: Iterable[int], times: Iterable[int]) -> Column:
        """Return a column with each of ``values`` so many ``times``."""
        return self._numpy.repeat(self.of(values), self.of(times))

    def taken(self, values: Column, places: Column) -> Column:
        """Return the ``values`` at ``places``."""
        return values[places]

    def order(self, values: Column) -> Column:
        """Return the places of ``values`` by their size; equal ones stay in their order."""
        return self._numpy.argsort(values, kind="stable")


def as_list(column: Column) -> list[Any]:
    """Return ``column`` as a list."""
    return column if isinstance(column, list) else column.tolist()
