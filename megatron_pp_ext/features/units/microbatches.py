"""Microbatches of unlike length: the documents of each, and the files that they are read from.

A file has the lengths of all documents of a step in tokens, one list for each microbatch.  It is JSON,

    [[4096, 1200, 2800], [8000], ...]

or text with a line for each microbatch, whose lengths are apart by spaces or commas.  A file of a
distribution is a JSON list of lengths in tokens, from which documents are drawn, all with the same chance.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self

from megatron_pp_ext.files import read_text
from megatron_pp_ext.json_input import naming, parse, read, short
from megatron_pp_ext.schedule.costs import MOST

MOST_DOCUMENTS = 1_000_000
"""The most documents of a step."""

LONGEST_DOCUMENT = 1 << 31
"""The longest document in tokens."""


def whole_number(name: str, value: Any, least: int = 1, most: int = LONGEST_DOCUMENT) -> int:
    """Return ``value`` as an int; ValueError unless it is a whole number from ``least`` to ``most``."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise ValueError(
            f"{name} is {value!r:.40}, but must be a whole number from {least:,} to {most:,}: correct it"
        )
    return number


def require_number(name: str, value: Any, rule: str = "0 or more", most: float = MOST) -> None:
    """Raise ValueError unless ``value`` is a number up to ``most`` that is ``rule``, of which NaN is none.

    The rule is "0 or more" or "above 0".
    """
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= most or (rule == "above 0" and not number):
        finite = "" if math.isinf(most) else f", at most {most:g}"
        raise ValueError(f"{name} is {value!r:.40}, but must be a number {rule}{finite}: correct it")


_FIX = "write a list of document lengths for each microbatch, such as [[4096, 1200], [8000]]"


class UnitSizes(NamedTuple):
    """The numbers of tokens that the costs of a unit go by.

    Time goes by ``squares``, those of documents, and the memory of scores by ``scores``, the products of
    tokens and those that they may see, hidden ones included.  A slice has ``end`` tokens up to its end; it is
    0 for a unit that is whole.  The first slice keeps ``stored`` tokens for all, the whole sequence.  The
    last one ``owes`` gradients to the tokens before it, which the first one, in its I, is ``owed``.
    """

    tokens: float
    squares: float
    scores: float
    end: float = 0.0
    stored: float = 0.0
    owes: float = 0.0
    owed: float = 0.0


@dataclass(frozen=True)
class Microbatches:
    """The microbatches of a step in the order in which the data gives them.

    ``documents[i]`` are the lengths in tokens of the documents of microbatch i.  Attention works within
    documents, so that its time goes by the sum of their squares.  Raises ValueError for a step without
    microbatches, for a microbatch without documents, and for a length that is no whole number above 0.
    """

    documents: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.documents:
            raise ValueError(f"there are no microbatches: {_FIX}")
        if (count := sum(map(len, self.documents))) > MOST_DOCUMENTS:
            raise ValueError(f"there are {count:,} documents, at most {MOST_DOCUMENTS:,}: give one step")
        for number, lengths in enumerate(self.documents):
            if not lengths:
                raise ValueError(f"microbatch {number} has no documents: give the length of at least one")
            if set(map(type, lengths)) == {int} and 0 < min(lengths) <= max(lengths) <= LONGEST_DOCUMENT:
                continue
            for length in lengths:
                if not isinstance(length, int) or isinstance(length, bool):
                    raise ValueError(
                        f"microbatch {number} has the length {length!r:.40}, but lengths are whole numbers "
                        "of tokens: correct it"
                    )
                if not 0 < length <= LONGEST_DOCUMENT:
                    raise ValueError(
                        f"microbatch {number} has the length {length!r:.40}, but a document has 1 to "
                        f"{LONGEST_DOCUMENT:,} tokens: correct it"
                    )

    @classmethod
    def of(cls, documents: Iterable[Iterable[int]]) -> Self:
        """Return the microbatches with these document lengths, which may be whole numbers of any type.

        ValueError for anything that is no list of lists.
        """
        try:
            step = tuple(map(tuple, documents))
        except TypeError:
            raise ValueError(
                f"the documents are {documents!r:.40}, but must be a list of lists: {_FIX}"
            ) from None
        return cls(
            tuple(lengths if set(map(type, lengths)) <= {int} else _as_int(lengths) for lengths in step)
        )

    def __len__(self) -> int:
        return len(self.documents)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        return tuple(map(sum, self.documents))

    @cached_property
    def squares(self) -> tuple[int, ...]:
        """The sum of the squared document lengths of each microbatch."""
        return tuple(sum(length * length for length in lengths) for lengths in self.documents)

    @property
    def sizes(self) -> tuple[UnitSizes, ...]:
        """The numbers by which each microbatch costs."""
        pairs = zip(self.tokens, self.squares, strict=True)
        return tuple(UnitSizes(tokens, squares, squares) for tokens, squares in pairs)

    @property
    def are_alike(self) -> bool:
        """Whether all microbatches take equally long."""
        return len(set(zip(self.tokens, self.squares, strict=True))) == 1

    def ordered(self, order: Sequence[int]) -> Self:
        """Return the step whose microbatch k is ``order[k]`` of this one."""
        return type(self)(tuple(self.documents[number] for number in order))


def _as_int(lengths: Sequence[Any]) -> tuple[Any, ...]:
    """Return whole numbers of any type as int, and all else as it is."""
    return tuple(
        index(length) if hasattr(length, "__index__") and not isinstance(length, bool) else length
        for length in lengths
    )


def read_step(path: Path) -> Microbatches:
    """Read the microbatches of a step from ``path``; ValueError, naming the file, for anything else."""
    with naming(path):
        try:
            text = read_text(path)
        except UnicodeDecodeError as error:
            raise ValueError(f"not a text ({error}): {_FIX}") from None
        lists = parse(text, _FIX) if text.lstrip()[:1] in ("[", "{") else _lines(text)
        if not isinstance(lists, list) or not all(isinstance(lengths, list) for lengths in lists):
            raise ValueError(f"has {short(lists)}, but must be a list of lists: {_FIX}")
        return Microbatches.of(lists)


def _lines(text: str) -> list[list[int]]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.replace(",", " ").split()
        try:
            if words:
                rows.append([int(word) for word in words])
        except ValueError:
            raise ValueError(
                f"line {number} is {short(line)}, which has more than whole numbers: {_FIX}"
            ) from None
    return rows


_FIX_OF_DISTRIBUTION = "write the document lengths to draw from, such as [4096, 1200, 8000]"


def read_distribution(path: Path) -> list[int]:
    """Read document lengths from ``path``; ValueError, naming the file, for anything else."""
    with naming(path):
        lengths = read(path, _FIX_OF_DISTRIBUTION)
        if not isinstance(lengths, list) or not lengths:
            raise ValueError(f"has {short(lengths)}, but must be a list of lengths: {_FIX_OF_DISTRIBUTION}")
        if len(lengths) > MOST_DOCUMENTS:
            raise ValueError(
                f"has {len(lengths):,} lengths, at most {MOST_DOCUMENTS:,} are read: leave some out"
            )
        for length in lengths:
            is_length = isinstance(length, int) and not isinstance(length, bool)
            if not is_length or not 0 < length <= LONGEST_DOCUMENT:
                raise ValueError(
                    f"has the length {short(length)}, but a document has 1 to {LONGEST_DOCUMENT:,} tokens: "
                    f"{_FIX_OF_DISTRIBUTION}"
                )
        return lengths


def drawn_step(lengths: Sequence[int], microbatches: int, most_tokens: int, random: Random) -> Microbatches:
    """Return a step whose documents are drawn from ``lengths`` and packed in the order in which they come.

    A microbatch has at most ``most_tokens`` tokens: the document that does not fit any more begins the next
    one, and longer documents are cut to this length.  ValueError for no lengths or microbatches.
    """
    if not lengths:
        raise ValueError(f"there are no lengths to draw from: {_FIX_OF_DISTRIBUTION}")
    most_tokens = whole_number("the most tokens of a microbatch", most_tokens)
    batches: list[list[int]] = []
    waiting = min(random.choice(lengths), most_tokens)
    for _ in range(microbatches):
        documents, tokens = [], 0
        while tokens + waiting <= most_tokens:
            documents.append(waiting)
            tokens += waiting
            waiting = min(random.choice(lengths), most_tokens)
        batches.append(documents)
    return Microbatches.of(batches)
