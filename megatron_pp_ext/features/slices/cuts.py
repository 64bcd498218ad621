"""Where sequences are cut: documents into slices of at most so many tokens, and short ones together."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from megatron_pp_ext.features.slices.units import Piece, Unit, Units

By = Literal["tokens", "cost"]
"""Slices of a document have equal tokens, or nearly equal cost: a later one attends to more, and has fewer.

Units of unlike cost make ranks wait for each other.  So slices by cost are more: as many more as is the part
of attention in the cost of the document's last token.
"""

_LITTLE = 0.01
"""The part of a slice for which there is none more."""


def bounds(length: int, slices: int, equal_at: float | None = None, most: int | None = None) -> list[int]:
    """Return where a document of ``length`` tokens is cut, with 0 and its length as the ends.

    Slices have equal tokens, or with ``equal_at`` equal cost of forward and backward, where attention of a
    document of so many tokens takes as long as all else.  Those that would have more than ``most`` tokens
    have so many, and the later ones share the rest.  ValueError for more slices than tokens, and for fewer
    than ``most`` needs.
    """
    if not 1 <= slices <= length:
        raise ValueError(f"{length} tokens do not make {slices} slices: give 1 to {length}")
    if most is not None and slices * most < length:
        raise ValueError(f"{length} tokens in {slices} slices are more than {most} in one: give more slices")
    if equal_at is None:
        return [length * number // slices for number in range(slices + 1)]
    found = [0]
    for left in range(slices, 1, -1):
        begin = found[-1]
        # x + x * x / a is the cost of the first x tokens.
        before, whole = (x + x * x / equal_at for x in (begin, length))
        cost = before + (whole - before) / left
        end = round(equal_at / 2 * (math.sqrt(1 + 4 * cost / equal_at) - 1))
        end = min(max(end, begin + 1), length - (left - 1), begin + (most or length))
        found.append(end)
    return [*found, length]


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
    ``multiple``.
    """
    if most_tokens < multiple:
        raise ValueError(f"units have at most {most_tokens} tokens, but need {multiple} or more: raise it")
    units, chain = list[Unit](), 0
    step = [tuple(lengths) for lengths in documents]
    for microbatch, lengths in enumerate(step):
        number = 0
        for pieces in _of_microbatch(lengths, most_tokens, equal_at if by == "cost" else math.inf, multiple):
            for one in pieces:
                units.append(Unit(microbatch, number, chain, one))
                number += 1
            chain += 1
    return Units.of(step, units, rows)


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
    blocks, most = length // multiple, most_tokens // multiple
    fewest = -(-blocks // most)
    if math.isinf(equal_at):
        cuts = bounds(blocks, fewest)
    else:
        of_attention = 2 * length / (2 * length + equal_at)
        wanted = math.ceil(blocks / most * (1 + of_attention) - _LITTLE)
        cuts = bounds(blocks, min(blocks, max(fewest, wanted)), equal_at / multiple, most)
    return [multiple * place for place in cuts]


def ordered(units: Units, chains: Sequence[int]) -> Units:
    """Return the same units with their chains in another order: place k has chain ``chains[k]``."""
    numbers = [0] * units.microbatches
    found = list[Unit]()
    for place, chain in enumerate(chains):
        for number in units.chains[chain]:
            unit = units.units[number]
            found.append(Unit(unit.microbatch, numbers[unit.microbatch], place, unit.pieces))
            numbers[unit.microbatch] += 1
    return replace(units, units=tuple(found))
