"""Units: what a stage computes at once, which is a slice of a sequence or a pack of whole short ones.

A schedule of units numbers them where others number microbatches: ``2F5`` is the forward of unit 5 by
stage 2.  All stages take the units forward in the order of their numbers.  The slices of one sequence are a
*chain* of consecutive numbers.  Attention of a slice reads the keys and values of the slices before it, so
the I of a chain run in reverse: the last slice's comes first, and each adds its share to the gradients of the
earlier keys and values.  W run at any time after their I.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Literal, NamedTuple, Self

from megatron_pp_ext.features.units.microbatches import Microbatches, UnitSizes, require_number, whole_number
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule, UnitName, together

MOST_UNITS = 500_000
"""The most units of a step."""


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
    Raises ValueError where the units do not have all tokens once, in forward order within each document, for
    documents as ``Microbatches`` does, and for more than ``MOST_UNITS``.
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
    def sizes(self) -> tuple[UnitSizes, ...]:
        """The numbers by which each unit costs."""
        sizes = list[UnitSizes]()
        for chain in self.chains:
            if len(chain) == 1:
                (number,) = chain
                squares = self.squares[number]
                sizes.append(UnitSizes(self.tokens[number], squares, squares))
                continue
            last, end = self.tokens[chain[-1]], 0
            whole = sum(self.tokens[number] for number in chain)
            for number in chain:
                tokens = self.tokens[number]
                end += tokens
                sizes.append(
                    UnitSizes(
                        tokens,
                        self.squares[number],
                        tokens * end / self.rows,
                        end,
                        stored=whole * (number == chain[0]),
                        owes=(whole - last) * (number == chain[-1]),
                        owed=(whole - last) * (number == chain[0]),
                    )
                )
        return tuple(sizes)

    @cached_property
    def chains(self) -> tuple[range, ...]:
        """The numbers of the units of each chain, in the order in which they stand."""
        chains, begin = list[range](), 0
        for _, group in groupby(self.units, key=lambda unit: unit.chain):
            end = begin + sum(1 for _ in group)
            chains.append(range(begin, end))
            begin = end
        return tuple(chains)

    @property
    def are_alike(self) -> bool:
        """Whether all microbatches are of one length, cut in one way."""
        cuts = zip(self.documents, map(len, self.of_microbatch), strict=True)
        return len(set(cuts)) == 1

    @cached_property
    def chain_of(self) -> tuple[range, ...]:
        """The chain of each unit, as the numbers of its units."""
        return tuple(chain for chain in self.chains for _ in chain)

    @cached_property
    def of_microbatch(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the units of each microbatch."""
        numbers: list[list[int]] = [[] for _ in self.documents]
        for number, unit in enumerate(self.units):
            numbers[unit.microbatch].append(number)
        return tuple(map(tuple, numbers))

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """The numbers of the units in the order of their I: chain by chain, each in reverse."""
        return tuple(number for chain in self.chains for number in reversed(chain))

    @cached_property
    def names(self) -> tuple[UnitName, ...]:
        """The name and the tokens of each unit, as schedules have them."""
        return tuple(
            UnitName(unit.microbatch, unit.slice, unit.prefix, unit.prefix + unit.tokens)
            for unit in self.units
        )

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
    """Raise ValueError unless ``units`` have every token once and chains are as in their class."""
    Microbatches(units.documents)
    whole_number("rows", units.rows)
    if len(units.units) > MOST_UNITS:
        raise too_many(len(units.units))
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
            if not 0 <= document < len(lengths):
                raise ValueError(f"{where} is of document {document} of {len(lengths)}: correct it")
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


def whole(documents: Iterable[Iterable[int]]) -> Units:
    """Return a unit for each of the microbatches with these ``documents``."""
    step = Microbatches.of(documents).documents
    if len(step) > MOST_UNITS:
        raise too_many(len(step))
    units = (
        Unit(number, 0, number, tuple(Piece(document, 0, length) for document, length in enumerate(lengths)))
        for number, lengths in enumerate(step)
    )
    return Units(step, tuple(units))


def too_many(units: int) -> ValueError:
    """Return the error for more ``units`` than a step may have."""
    return ValueError(
        f"a step has {units:,} units or more, but at most {MOST_UNITS:,}: give more tokens to a unit, or a "
        "shorter step"
    )


def named_units(names: Sequence[UnitName], rows: int = 1) -> Units:
    """Return the units of a schedule with these ``names``, whose microbatches are one document each."""
    edges: dict[int, list[int]] = {}
    for name in names:
        edges.setdefault(name.microbatch, [0]).append(name.end)
    return cut_at([edges[microbatch] for microbatch in range(len(edges))], rows)


def cut_at(bounds: Sequence[Sequence[int]], rows: int = 1) -> Units:
    """Return units for microbatches of one document each, cut at its ``bounds`` from 0 to its end."""
    for microbatch, edges in enumerate(bounds):
        if len(edges) < 2:
            raise ValueError(f"microbatch {microbatch} has no unit: give its cuts, with 0 and its end")
    units = (
        Unit(microbatch, number, microbatch, (Piece(0, begin, end),))
        for microbatch, edges in enumerate(bounds)
        for number, (begin, end) in enumerate(pairwise(edges))
    )
    return Units.of([[edges[-1]] for edges in bounds], units, rows)


By = Literal["tokens", "cost"]
"""Slices of a document have equal tokens, or nearly equal cost: a later one attends to more, and has fewer.

Units of unlike cost make ranks wait for each other.  So slices by cost are more: as many more as is the part
of attention in the cost of the document's last token.
"""

_NEVER = 1e15
"""The ``equal_at`` above which attention costs nothing; below the inverse it costs all."""

_LITTLE = 0.01
"""The part of a slice for which there is none more."""


def bounds(length: int, slices: int, equal_at: float | None = None, most: int | None = None) -> list[int]:
    """Return where a document of ``length`` tokens is cut, with 0 and its length as the ends.

    Slices have equal tokens, or with ``equal_at`` equal cost of forward and backward, where attention of a
    document of so many tokens takes as long as all else.  Those that would have more than ``most`` tokens
    have so many, and the later ones share the rest.  ValueError for more slices than tokens or
    ``MOST_UNITS``, for fewer than ``most`` needs, and for an ``equal_at`` that is not above 0.
    """
    length, slices = whole_number("length", length), whole_number("slices", slices, most=MOST_UNITS)
    if equal_at is not None:
        require_number("equal_at", equal_at, "above 0", math.inf)
    if not 1 <= slices <= length:
        raise ValueError(f"{length} tokens do not make {slices} slices: give 1 to {length}")
    if most is not None and slices * whole_number("most", most) < length:
        raise ValueError(f"{length} tokens in {slices} slices are more than {most} in one: give more slices")
    if equal_at is None or equal_at > _NEVER:
        return [length * number // slices for number in range(slices + 1)]
    edges, equal_at = [0], max(equal_at, 1 / _NEVER)
    for remaining in range(slices, 1, -1):
        begin = edges[-1]
        # x + x * x / a is the cost of the first x tokens.
        before, whole = (x + x * x / equal_at for x in (begin, length))
        cost = before + (whole - before) / remaining
        end = round(2 * cost / (1 + math.sqrt(1 + 4 * cost / equal_at)))
        end = min(max(end, begin + 1), length - (remaining - 1), begin + (most or length))
        edges.append(end)
    return [*edges, length]


def cut(
    documents: Iterable[Sequence[int]],
    most_tokens: int,
    by: By = "cost",
    equal_at: float = math.inf,
    multiple: int = 1,
    rows: int = 1,
) -> Units:
    """Return the units of microbatches with these documents, of at most ``most_tokens`` tokens each.

    Longer documents are cut into slices, as few as there can be where they have equal tokens, and shorter
    ones go together in their order.  Attention of a document of ``equal_at`` tokens takes as long as all else
    of its forward.  Microbatches follow each other, and in each the long documents come
    before the short ones.  Slices end at a ``multiple`` of so many tokens, which divides all lengths.  A
    token stands for one of each of the ``rows`` of a batch.  ValueError for ``most_tokens`` below
    ``multiple``, for documents as ``Microbatches`` raises it, and for more than ``MOST_UNITS``.
    """
    most_tokens, multiple = whole_number("most_tokens", most_tokens), whole_number("multiple", multiple)
    require_number("equal_at", equal_at, "above 0", math.inf)
    if most_tokens < multiple:
        raise ValueError(f"units have at most {most_tokens} tokens, but need {multiple} or more: raise it")
    units, chain = list[Unit](), 0
    step = Microbatches.of(documents).documents
    if len(step) > MOST_UNITS:
        raise too_many(len(step))
    for microbatch, lengths in enumerate(step):
        number = 0
        for pieces in _of_microbatch(lengths, most_tokens, equal_at if by == "cost" else math.inf, multiple):
            for group in pieces:
                units.append(Unit(microbatch, number, chain, group))
                number += 1
            chain += 1
            if len(units) > MOST_UNITS:
                raise too_many(len(units))
    return Units(step, tuple(units), rows)


def _of_microbatch(
    lengths: Sequence[int], most_tokens: int, equal_at: float, multiple: int
) -> Iterable[list[tuple[Piece, ...]]]:
    """Yield the pieces of each unit of each chain."""
    pack, tokens = list[Piece](), 0
    packs = list[list[tuple[Piece, ...]]]()
    for document, length in enumerate(lengths):
        if length > most_tokens:
            cuts = _within(length, most_tokens, equal_at, multiple)
            yield [(Piece(document, begin, end),) for begin, end in pairwise(cuts)]
            continue
        if tokens + length > most_tokens:
            packs.append([tuple(pack)])
            pack, tokens = [], 0
        pack.append(Piece(document, 0, length))
        tokens += length
    if pack:
        packs.append([tuple(pack)])
    yield from packs


def _within(length: int, most_tokens: int, equal_at: float, multiple: int) -> list[int]:
    """Return the cuts of a document into slices of at most ``most_tokens``."""
    if length % multiple:
        raise ValueError(
            f"a document has {length} tokens, which {multiple} does not divide: give it padding, or a "
            "multiple that divides all lengths"
        )
    blocks, most = length // multiple, most_tokens // multiple
    fewest = -(-blocks // most)
    if equal_at > _NEVER:
        cuts = bounds(blocks, fewest)
    else:
        of_attention = 2 * length / (2 * length + equal_at)
        wanted = math.ceil(blocks / most * (1 + of_attention) - _LITTLE)
        cuts = bounds(blocks, min(blocks, max(fewest, wanted)), equal_at / multiple, most)
    return [multiple * place for place in cuts]


def ordered(units: Units, chains: Sequence[int]) -> Units:
    """Return the same units with their chains in another order: place k has chain ``chains[k]``."""
    numbers = [0] * units.microbatches
    renumbered = list[Unit]()
    for place, chain in enumerate(chains):
        for number in units.chains[chain]:
            unit = units.units[number]
            renumbered.append(Unit(unit.microbatch, numbers[unit.microbatch], place, unit.pieces))
            numbers[unit.microbatch] += 1
    return replace(units, units=tuple(renumbered))


type Documents = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Heaviest(Units):
    """Units of which each has the most tokens, and the most attention, of those in its place.

    ``squares_of[m]`` are the ``Unit.squares`` of the units of microbatch m in their order.
    """

    squares_of: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def squares(self) -> tuple[int, ...]:
        return tuple(self.squares_of[unit.microbatch][unit.slice] * self.rows for unit in self.units)


def cut_alike(
    pipelines: Sequence[Documents], most_tokens: int, multiple: int = 1, rows: int = 1
) -> tuple[Heaviest, tuple[Units, ...]]:
    """Return the units to plan for, and those of each of the ``pipelines``, which share experts.

    Such pipelines exchange tokens in every action, so that all of them run one order, and their sequences
    differ.  The microbatches in one place are therefore cut into as many units everywhere, as many as any of
    them needs, in one chain: that is what slices of one sequence need, and packs of short ones may do it.
    The order is planned for the heaviest unit in each place.

    These have the documents of as many microbatches each.  A unit has at most ``most_tokens`` tokens, but for
    packs of documents that are short in other pipelines and long in one.  The other arguments are those of
    ``cut``.  ValueError where a microbatch has fewer tokens than it would get units.
    """
    natural = [cut(documents, most_tokens, multiple=multiple, rows=rows) for documents in pipelines]
    if len(numbers := {replica.microbatches for replica in natural}) != 1:
        raise ValueError(
            f"the pipelines that share experts have {sorted(numbers)} microbatches: give as many to each"
        )
    places = zip(*(replica.of_microbatch for replica in natural), strict=True)
    counts = [max(map(len, of_place)) for of_place in places]
    recut = tuple(_recut(replica, counts, multiple) for replica in natural)
    tokens, squares = list[list[int]](), list[tuple[int, ...]]()
    for microbatch in range(len(counts)):
        units = [[replica.units[number] for number in replica.of_microbatch[microbatch]] for replica in recut]
        together = list(zip(*units, strict=True))
        tokens.append([max(unit.tokens for unit in of_place) for of_place in together])
        squares.append(tuple(max(unit.squares for unit in of_place) for of_place in together))
    heaviest = [
        Unit(microbatch, number, microbatch, (Piece(0, *ends),))
        for microbatch, sizes in enumerate(tokens)
        for number, ends in enumerate(pairwise(accumulate(sizes, initial=0)))
    ]
    documents = tuple((sum(sizes),) for sizes in tokens)
    return Heaviest(documents, tuple(heaviest), rows, tuple(squares)), recut


def in_order_of(planned: Units, units: Units) -> Units:
    """Return ``units`` with their microbatches in the order of ``planned`` ones."""
    place = {unit.microbatch: number for number, unit in enumerate(planned.units)}
    firsts = [units.units[chain.start].microbatch for chain in units.chains]
    return ordered(units, sorted(range(len(firsts)), key=lambda chain: place[firsts[chain]]))


def _recut(units: Units, counts: Sequence[int], multiple: int) -> Units:
    """Return the same documents in ``counts[m]`` units of microbatch m, no fewer than it has."""
    result, chain = list[Unit](), 0
    chains_of: list[list[list[tuple[Piece, ...]]]] = [[] for _ in counts]
    for numbers in units.chains:
        of_chain = [units.units[number].pieces for number in numbers]
        chains_of[units.units[numbers.start].microbatch].append(of_chain)
    for microbatch, count in enumerate(counts):
        chains = chains_of[microbatch]
        while (total := sum(map(len, chains))) < count:
            lengths = units.documents[microbatch]
            at = max(range(len(chains)), key=lambda index: _mean(chains[index], lengths, multiple))
            if not _mean(chains[at], lengths, multiple):
                raise ValueError(
                    f"microbatch {microbatch} of a pipeline has {sum(lengths)} tokens, which make {total} "
                    f"units, and one in its place makes {count} in a pipeline that it shares experts with: "
                    "give longer slices, or microbatches of like length to one place"
                )
            chains[at : at + 1] = _in_more(chains[at], lengths, multiple)
        number = 0
        for slices in chains:
            for pieces in slices:
                result.append(Unit(microbatch, number, chain, pieces))
                number += 1
            chain += 1
    return Units(units.documents, tuple(result), units.rows)


def _mean(chain: Sequence[tuple[Piece, ...]], lengths: Sequence[int], multiple: int) -> float:
    """Return the tokens of a mean unit of ``chain``; 0 where it cannot have one more."""
    tokens = sum(end - begin for pieces in chain for _, begin, end in pieces)
    if len(chain[0]) == 1 and lengths[chain[0][0].document] < multiple * (len(chain) + 1):
        return 0.0
    return tokens / len(chain)


def _in_more(
    chain: Sequence[tuple[Piece, ...]], lengths: Sequence[int], multiple: int
) -> list[list[tuple[Piece, ...]]]:
    """Return the chains of the same documents in one unit more."""
    pieces = chain[0]
    if len(pieces) > 1:
        middle = len(pieces) // 2
        return [[pieces[:middle]], [pieces[middle:]]]
    document = pieces[0].document
    cuts = bounds(lengths[document] // multiple, len(chain) + 1)
    return [[(Piece(document, multiple * begin, multiple * end),) for begin, end in pairwise(cuts)]]


_FORWARDS = Kind.F, Kind.S


def more(units: Units) -> int:
    """Return how many forwards the first backward of a unit waits for, besides that of the first unit."""
    return max(map(len, units.chains)) - 1


def shifted(schedule: Schedule, units: Units) -> Schedule:
    """Return ``schedule``, which is for ``len(units) + more(units)`` microbatches or more, for ``units``.

    ValueError for schedules with copies to the host, which are planned for microbatches.

    A schedule for microbatches does the backward of microbatch j no earlier than its forward.  Of a sequence
    in k slices the last one's backward comes first, k - 1 forwards later than its first slice's could.  So
    the family makes an order for k - 1 microbatches more than there are units.  Its first k - 1 backwards are
    left out, as are its last k - 1 forwards, and backward number j + k - 1 is the jth in the units' own
    order.  An action then waits only for actions that it also waited for before, so ranks cannot come to wait
    for each other.
    """
    if schedule.copies:
        raise ValueError("activations of slices are not copied to the host: leave one of the two out")
    count, delay, backwards = len(units), more(units), units.backwards
    paired: set[Action] = set()

    def moved(order: Iterable[Action]) -> Iterator[Action]:
        for actions in together(tuple(order), schedule.paired):
            pair = list[Action]()
            for action in actions:
                if action.kind in _FORWARDS:
                    if action.microbatch < count:
                        pair.append(action)
                elif delay <= action.microbatch < count + delay:
                    pair.append(action._replace(microbatch=backwards[action.microbatch - delay]))
            if len(pair) > 1:
                paired.add(pair[0])
            yield from pair

    orders = tuple(tuple(moved(order)) for order in schedule.orders)
    return replace(schedule, microbatches=count, orders=orders, paired=frozenset(paired), units=units.names)


def require_chain_order(schedule: Schedule, units: Units) -> None:
    """Raise ValueError unless every stage takes slices forward in their order, and back in reverse."""
    if schedule.microbatches != len(units):
        raise ValueError(
            f"the schedule is for {schedule.microbatches} units, but there are {len(units)}: "
            "make it for as many"
        )
    latest: dict[tuple[int, bool, int], int] = {}
    for action in schedule:
        stage, kind, unit = action
        if kind not in (Kind.F, Kind.I, Kind.B):
            continue
        is_forward, chain = kind is Kind.F, units.chain_of[unit]
        before = unit - 1 if is_forward else unit + 1
        if before in chain and latest.get((stage, is_forward, chain[0])) != before:
            raise ValueError(
                f"{action} comes before that of slice {units.units[before].slice} of its sequence: slices go "
                "forward in their order and back in reverse"
            )
        latest[stage, is_forward, chain[0]] = unit
