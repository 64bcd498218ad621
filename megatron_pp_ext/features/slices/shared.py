"""Units of pipelines that share experts: each microbatch has as many in all of them, in one chain.

Pipelines that share experts exchange tokens in every action, so that all of them run one order.  Their
sequences differ.  The microbatches in one place are therefore cut into as many units everywhere, as many as
any of them needs, whose forwards run in order and input gradients in reverse.  That is what slices of one
sequence need, and packs of short ones may do it, too.  The order is planned for the heaviest unit in each
place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from megatron_pp_ext.features.slices.cuts import bounds, cut, ordered
from megatron_pp_ext.features.slices.units import Piece, Unit, Units

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
    """Return the units to plan for, and those of each of the ``pipelines``.

    These have the documents of as many microbatches each.  A unit has at most ``most_tokens`` tokens, but for
    packs of documents that are short in other pipelines and long in one.  The other arguments are those of
    ``cut``.  ValueError where a microbatch has fewer tokens than it would get units.
    """
    natural = [cut(documents, most_tokens, multiple=multiple, rows=rows) for documents in pipelines]
    places = zip(*(one.of_microbatch for one in natural), strict=True)
    counts = [max(map(len, of_place)) for of_place in places]
    own = tuple(_recut(one, counts, multiple) for one in natural)
    tokens, squares = list[list[int]](), list[tuple[int, ...]]()
    for microbatch in range(len(counts)):
        units = [[one.units[number] for number in one.of_microbatch[microbatch]] for one in own]
        together = list(zip(*units, strict=True))
        tokens.append([max(unit.tokens for unit in of_place) for of_place in together])
        squares.append(tuple(max(unit.squares for unit in of_place) for of_place in together))
    found = [
        Unit(microbatch, number, microbatch, (Piece(0, *ends),))
        for microbatch, sizes in enumerate(tokens)
        for number, ends in enumerate(pairwise(accumulate(sizes, initial=0)))
    ]
    documents = tuple((sum(sizes),) for sizes in tokens)
    return Heaviest(documents, tuple(found), rows, tuple(squares)), own


def in_order_of(planned: Units, own: Units) -> Units:
    """Return ``own`` units with their microbatches in the order of ``planned`` ones."""
    place = {unit.microbatch: number for number, unit in enumerate(planned.units)}
    firsts = [own.units[chain.start].microbatch for chain in own.chains]
    return ordered(own, sorted(range(len(firsts)), key=lambda chain: place[firsts[chain]]))


def _recut(units: Units, counts: Sequence[int], multiple: int) -> Units:
    """Return the same documents in ``counts[m]`` units of microbatch m, no fewer than it has."""
    found, chain = list[Unit](), 0
    for microbatch, count in enumerate(counts):
        chains = [
            [units.units[number].pieces for number in numbers]
            for numbers in units.chains
            if units.units[numbers.start].microbatch == microbatch
        ]
        while (made := sum(map(len, chains))) < count:
            lengths = units.documents[microbatch]
            at = max(range(len(chains)), key=lambda one: _mean(chains[one], lengths, multiple))
            if not _mean(chains[at], lengths, multiple):
                raise ValueError(
                    f"microbatch {microbatch} of a pipeline has {sum(lengths)} tokens, which make {made} "
                    f"units, and one in its place makes {count} in a pipeline that it shares experts with: "
                    "give longer slices, or microbatches of like length to one place"
                )
            chains[at : at + 1] = _in_more(chains[at], lengths, multiple)
        number = 0
        for one in chains:
            for pieces in one:
                found.append(Unit(microbatch, number, chain, pieces))
                number += 1
            chain += 1
    return Units(units.documents, tuple(found), units.rows)


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
