"""Units: what a stage computes at once, which is a slice of a sequence or a pack of whole short ones.

A schedule of units numbers them where others number microbatches: ``2F5`` is the forward of unit 5 by
stage 2.  All stages take the units forward in the order of their numbers.  The slices of one sequence are a
*chain* of consecutive numbers.  Attention of a slice reads the keys and values of the slices before it, so
the I of a chain run in reverse: the last slice's comes first, and each adds its share to the gradients of the
earlier keys and values.  W run at any time after their I.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple, Self

from megatron_pp_ext.schedule.actions import UnitName


class Piece(NamedTuple):
    """The tokens from ``begin`` to ``end`` of one document, by its number within the microbatch."""

    document: int
    begin: int
    end: int


class Unit(NamedTuple):
    """Tokens of one ``microbatch`` that a stage computes at once.

    ``slice`` is the number of the unit within its microbatch.  ``pieces`` are either one slice of one
    document or any number of whole ones.  Units of one ``chain`` are the slices of one document.
    """

    microbatch: int
    slice: int
    chain: int
    pieces: tuple[Piece, ...]

    @property
    def tokens(self) -> int:
        """The tokens that are computed."""
        return sum(end - begin for _, begin, end in self.pieces)

    @property
    def prefix(self) -> int:
        """The tokens of the document before the unit, whose keys and values attention reads."""
        return self.pieces[0].begin

    @property
    def squares(self) -> int:
        """Twice the pairs of tokens of causal attention, up to the diagonal, as a sum of squares.

        Those of the slices of a document add up to its squared length.
        """
        return sum(end * end - begin * begin for _, begin, end in self.pieces)


@dataclass(frozen=True)
class Units:
    """The units of a step in their forward order.

    ``documents[m]`` are the lengths in tokens of the documents of microbatch m.  Where a microbatch is not
    packed, it is one document, of which every token stands for one of each of its ``rows`` sequences.
    Raises ValueError where the units do not have all tokens once, in forward order within each document.
    """

    documents: tuple[tuple[int, ...], ...]
    units: tuple[Unit, ...]
    rows: int = 1

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def of(cls, documents: Iterable[Iterable[int]], units: Iterable[Unit], rows: int = 1) -> Self:
        """Return the units of a step with these documents in each microbatch."""
        return cls(tuple(map(tuple, documents)), tuple(units), rows)

    def __len__(self) -> int:
        return len(self.units)

    @property
    def microbatches(self) -> int:
        return len(self.documents)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of each unit, in all rows."""
        return tuple(unit.tokens * self.rows for unit in self.units)

    @cached_property
    def squares(self) -> tuple[int, ...]:
        """The sums of squares of each unit (``Unit.squares``), in all rows."""
        return tuple(unit.squares * self.rows for unit in self.units)

    @cached_property
    def chains(self) -> tuple[range, ...]:
        """The numbers of the units of each chain, in the order in which they stand."""
        found, begin = list[range](), 0
        for _, group in groupby(self.units, key=lambda unit: unit.chain):
            end = begin + sum(1 for _ in group)
            found.append(range(begin, end))
            begin = end
        return tuple(found)

    @cached_property
    def chain_of(self) -> tuple[range, ...]:
        """The chain of each unit, as the numbers of its units."""
        return tuple(chain for chain in self.chains for _ in chain)

    @cached_property
    def of_microbatch(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the units of each microbatch."""
        found: list[list[int]] = [[] for _ in self.documents]
        for number, unit in enumerate(self.units):
            found[unit.microbatch].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """The numbers of the units in the order of their I: chain by chain, each in reverse."""
        return tuple(number for chain in self.chains for number in reversed(chain))

    @cached_property
    def names(self) -> tuple[UnitName, ...]:
        """The name of each unit, for people."""
        return tuple(UnitName(unit.microbatch, unit.slice) for unit in self.units)

    def is_first(self, number: int) -> bool:
        """Whether no slice of the same document comes before the unit."""
        return number == self.chain_of[number][0]

    def is_last(self, number: int) -> bool:
        """Whether no slice of the same document comes after the unit."""
        return number == self.chain_of[number][-1]

    def positions(self, number: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of the unit's tokens within its microbatch, whose documents follow each other."""
        unit = self.units[number]
        lengths = self.documents[unit.microbatch]
        return tuple(
            (sum(lengths[:document]) + begin, sum(lengths[:document]) + end)
            for document, begin, end in unit.pieces
        )


def _check(units: Units) -> None:
    """Raise ValueError unless ``units`` have every token once and chains are as their class says."""
    ends: dict[tuple[int, int], int] = {}
    slices, last = [0] * len(units.documents), dict[int, int]()
    for number, unit in enumerate(units.units):
        where = f"unit {number}"
        if not 0 <= unit.microbatch < len(units.documents) or not unit.pieces:
            raise ValueError(f"{where} is of no microbatch or empty: correct it")
        if unit.slice != slices[unit.microbatch]:
            raise ValueError(
                f"{where} is slice {unit.slice}, not {slices[unit.microbatch]}, of its microbatch"
            )
        slices[unit.microbatch] += 1
        lengths = units.documents[unit.microbatch]
        for document, begin, end in unit.pieces:
            is_part = begin > 0 or end < lengths[document]
            if is_part and len(unit.pieces) > 1:
                raise ValueError(f"{where} has a part of a document among others: give it a unit of its own")
            if begin != ends.get((unit.microbatch, document), 0) or not begin < end <= lengths[document]:
                raise ValueError(f"{where} has tokens {begin} to {end}, which do not follow those before")
            ends[unit.microbatch, document] = end
        begins_here = unit.pieces[0].begin == 0
        if begins_here == (unit.chain in last) or (not begins_here and last[unit.chain] != number - 1):
            raise ValueError(f"{where} does not continue its chain: number the slices of a document in a row")
        last[unit.chain] = number
    for microbatch, lengths in enumerate(units.documents):
        for document, length in enumerate(lengths):
            if ends.get((microbatch, document), 0) != length:
                raise ValueError(f"document {document} of microbatch {microbatch} is not whole in the units")


def equal_slices(microbatches: int, slices: int, tokens: int, rows: int = 1) -> Units:
    """Return units for microbatches of one document of ``tokens`` tokens each, in equal ``slices``."""
    bounds = [tokens * number // slices for number in range(slices + 1)]
    return cut_at([bounds] * microbatches, rows)


def cut_at(bounds: Sequence[Sequence[int]], rows: int = 1) -> Units:
    """Return units for microbatches of one document each, cut at its ``bounds`` from 0 to its end."""
    units = (
        Unit(microbatch, number, microbatch, (Piece(0, begin, end),))
        for microbatch, one in enumerate(bounds)
        for number, (begin, end) in enumerate(pairwise(one))
    )
    return Units.of([[one[-1]] for one in bounds], units, rows)
