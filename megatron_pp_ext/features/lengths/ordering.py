"""How the microbatches of training steps are ordered: the option of a request, and how lengths are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from megatron_pp_ext.compiler.request import Option, Request
from megatron_pp_ext.features.lengths.orders import How

FLAG = "--pipeline-order"

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
            if (ends := batch.get(name)) is not None and hasattr(ends, "flatten"):
                numbers = ends.flatten().tolist()
                # Padding repeats the last end.
                return [end - start for start, end in pairwise(numbers) if end > start]
        for name in _TOKENS:
            # A nested tensor, as of verl, has rows of unlike length, and no length that is a number.
            tokens: Any = batch.get(name)
            if len(getattr(tokens, "shape", ())) == 2 and not getattr(tokens, "is_nested", False):
                rows, length = tokens.shape
                return [length] * rows
    raise ValueError(
        "the lengths of documents are not known: the data has no tensor of their ends "
        f"({', '.join(_PACKED)}) and none of rows ({', '.join(_TOKENS)}); give lengths, a function of what "
        "the data iterator yields, or leave the order out"
    )


@dataclass(frozen=True, slots=True)
class Ordering(Option):
    """How microbatches are ordered, and by which lengths.

    ``costs_from`` is the file with what the stages cost at one length; empty where the model tells it, or a
    call.  A request without this option has the order of the data, of which nothing is read ahead then.
    """

    how: How
    lengths_of: LengthsOf = lengths_of_batch
    costs_from: str = ""

    @property
    def about(self) -> str:
        if self.how == "given":
            return "microbatches in the order of the data"
        how = "by the rule of the schedule" if self.how == "rule" else "as a search finds"
        costs = f"costs from {self.costs_from}" if self.costs_from else "costs of the model's layers"
        return f"microbatches of unlike length ordered {how}, {costs}"


def with_order(request: Request, how: object, limit: float | str | None = None) -> Request:
    """Return ``request`` with an order of microbatches; ValueError, in one line, for an unknown one."""
    if how != "given" and how != "rule" and how != "search":
        raise ValueError(f"order is {how!r}; give 'given', 'rule' or 'search'")
    return request.with_option(Ordering(how))


def with_lengths(request: Request, lengths_of: LengthsOf, limit: float | str | None = None) -> Request:
    """Return ``request`` with a function that reads lengths; ValueError, in one line, if it has no use."""
    ordering = request.option(Ordering)
    if ordering is None:
        raise ValueError(
            "lengths are given without an order that goes by them; give order='rule', or no lengths"
        )
    return request.with_option(replace(ordering, lengths_of=lengths_of))
