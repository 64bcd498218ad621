"""How the microbatches of training steps are ordered: the option of a request, and how lengths are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from megatron_pp_ext.compiler.request import Option, Request
from megatron_pp_ext.features.lengths.length_costs import EQUAL_AT
from megatron_pp_ext.features.lengths.orders import How
from megatron_pp_ext.job import options

LengthsOf = Callable[[Any], Sequence[int]]
"""What a data iterator yields for a microbatch -> the lengths of its documents in tokens."""

_PACKED = "cu_seqlens", "cu_seqlens_q"
_TOKENS = "tokens", "input_ids"


def lengths_of_batch(batch: Any) -> list[int]:
    """Return the document lengths of a batch as Megatron's datasets yield it.

    A packed one states where documents end; any other has a document in each row.  ValueError for anything
    else.
    """
    if isinstance(batch, Mapping):
        for name in _PACKED:
            if (ends := batch.get(name)) is not None:
                numbers = [int(end) for end in ends.flatten()]
                # Padding repeats the last end.
                return [end - start for start, end in pairwise(numbers) if end > start]
        for name in _TOKENS:
            if (tokens := batch.get(name)) is not None:
                rows, length = tokens.shape
                return [length] * rows
    raise ValueError(
        "the lengths of documents are not known: the data has none of "
        f"{', '.join((*_PACKED, *_TOKENS))}; give lengths, a function of what the data iterator yields"
    )


@dataclass(frozen=True, slots=True)
class Ordering(Option):
    """How microbatches are ordered, and by which lengths.

    A document of ``equal_at`` tokens takes as long for attention as for all else.
    """

    how: How
    lengths_of: LengthsOf = lengths_of_batch
    equal_at: float = EQUAL_AT

    @property
    def about(self) -> str:
        if self.how == "given":
            return ""
        how = "by the rule of the schedule" if self.how == "rule" else "as a search finds"
        return f"microbatches of unlike length ordered {how}"


def with_order(request: Request, how: object, limit: float | str | None = None) -> Request:
    """Return ``request`` with an order of microbatches.

    ValueError, in one line, for an unknown order, and for compiled schedules, whose memory limits are for
    equal microbatches.
    """
    if how != "given" and how != "rule" and how != "search":
        raise ValueError(f"order is {how!r}; give 'given', 'rule' or 'search'")
    if how != "given" and request.is_compiled:
        raise ValueError(
            f"order is {how!r}, and the memory limit of {request.schedule} is kept for equal microbatches "
            "alone; leave the order out, or choose a schedule by name, such as v-half"
        )
    return request.with_option(Ordering(how))


def with_lengths(request: Request, lengths_of: LengthsOf, limit: float | str | None = None) -> Request:
    """Return ``request`` with a function that reads lengths; ValueError, in one line, without an order."""
    ordering = request.option(Ordering)
    if ordering is None:
        raise ValueError("lengths are given without an order; give order='rule' or 'search'")
    return request.with_option(replace(ordering, lengths_of=lengths_of))


def register() -> None:
    """Add the arguments of ``install``."""
    options.register_argument(options.Argument("order", with_order))
    options.register_argument(options.Argument("lengths", with_lengths))
