"""How the microbatches of training steps are ordered: the option of a request, and how lengths are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from megatron_pp_ext.compiler.request import Option, Request
from megatron_pp_ext.features.lengths.orders import How
from megatron_pp_ext.features.lengths.rules import PACKED, RULES, has_packed
from megatron_pp_ext.job import options, other_sums, our_flags
from megatron_pp_ext.job.other_sums import OtherSums
from megatron_pp_ext.job.requested_job import RequestedJob

FLAG = "--pipeline-order"

SUMS = OtherSums(FLAG, "gradients are summed in another order of microbatches", fp32=1e-5, lower=1e-1)
"""The sums of a job with the flag, or with packed sequences, which are ordered without it."""

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
                numbers = ends.flatten().tolist()
                # Padding repeats the last end.
                return [end - start for start, end in pairwise(numbers) if end > start]
        for name in _TOKENS:
            # A nested tensor, as of verl, has rows of unlike length, and no length that is a number.
            if (tokens := batch.get(name)) is not None and not getattr(tokens, "is_nested", False):
                rows, length = tokens.shape
                return [length] * rows
    raise ValueError(
        "the lengths of documents are not known: the data has none of "
        f"{', '.join((*_PACKED, *_TOKENS))}; give lengths, a function of what the data iterator yields, or "
        "leave the order out"
    )


def is_packed(batch: Any) -> bool:
    """Whether a batch states the documents in it, which may be others in batches of the same shape."""
    return isinstance(batch, Mapping) and any(batch.get(name) is not None for name in _PACKED)


@dataclass(frozen=True, slots=True)
class Ordering(Option):
    """How microbatches are ordered, and by which lengths.

    ``costs_from`` is the file with what the stages cost at one length; empty where the model tells it, or a
    call.  ``is_default`` is true where nobody asked for an order: data whose lengths cannot be told is left
    as it is then, and is an error otherwise.  With ``is_watched`` the first step is in the order of the data,
    and decides whether later ones can and need be ordered.  ``why_given`` is why the data's order is kept
    where the default would be another one.
    """

    how: How
    lengths_of: LengthsOf = lengths_of_batch
    costs_from: str = ""
    is_default: bool = False
    is_watched: bool = False
    why_given: str = ""

    @property
    def about(self) -> str:
        if self.how == "given":
            return "microbatches in the order of the data" + (self.why_given and f" ({self.why_given})")
        if self.is_watched:
            return (
                "microbatches ordered by the rule of the schedule from step 2 on if their lengths differ "
                "(order='given' leaves them)"
            )
        how = "by the rule of the schedule" if self.how == "rule" else "as a search finds"
        costs = f"costs from {self.costs_from}" if self.costs_from else "costs of the model's layers"
        other = f" ({FLAG} given leaves them in the order of the data)" if self.is_default else ""
        return f"microbatches of unlike length ordered {how}, {costs}{other}"


def with_order(request: Request, how: object, limit: float | str | None = None) -> Request:
    """Return ``request`` with an order of microbatches; ValueError, in one line, for an unknown one."""
    if how != "given" and how != "rule" and how != "search":
        raise ValueError(f"order is {how!r}; give 'given', 'rule' or 'search'")
    return request.with_option(Ordering(how))


def with_lengths(request: Request, lengths_of: LengthsOf, limit: float | str | None = None) -> Request:
    """Return ``request`` with a function that reads lengths; ValueError, in one line, if it has no use."""
    ordering = by_default(request).option(Ordering)
    if ordering is None:
        raise ValueError("lengths are given without an order, and slices are equal then; give order='rule'")
    return request.with_option(replace(ordering, lengths_of=lengths_of))


def by_default(request: Request) -> Request:
    """Return ``request`` with the order of a call that gives none: by the rule where lengths differ.

    Slices without an order are those of sequences of one length.
    """
    if request.option(Ordering) is not None or any(option.orders_lengths for option in request.options):
        return request
    return request.with_option(Ordering("rule", is_default=True, is_watched=True))


def read(asked: RequestedJob, request: Request) -> Request:
    """Return ``request`` with the order that the flags ask for, or that of packed sequences.

    A call's is there already, and stays unless it is a default that the model rules out.  See
    ``job.options.Read``.
    """
    how, of_call = asked.flags.pipeline_order, request.option(Ordering)
    if of_call is not None and of_call.is_watched and (why := _refused(asked)):
        return request.with_option(Ordering("given", is_default=True, why_given=why))
    if of_call is not None or request.is_stock:
        return request
    if how is not None:
        return request.with_option(_of_flags(asked, how))
    if not asked.pipeline.has_schedule or not has_packed(asked):
        return request
    if why := _refused(asked):
        return request.with_option(Ordering("given", is_default=True, why_given=why))
    return request.with_option(replace(_of_flags(asked, "rule"), is_default=True))


def _of_flags(asked: RequestedJob, how: How) -> Ordering:
    file = asked.pipeline.pipeline_costs
    return Ordering(how, costs_from="" if file is None else f"--pipeline-costs {file}")


def _refused(asked: RequestedJob) -> str:
    """Return why an order other than that of the data cannot be; empty where it can."""
    ordered = asked.changed(pipeline_order="rule")
    return next((rules.why_of(rule) for rules in RULES for rule in rules.broken(ordered)), "")


def _flags(request: Request) -> Mapping[str, Any]:
    found = request.option(Ordering)
    return {"pipeline_order": None if found is None or found.is_default else found.how}


def register() -> None:
    """Add the flag, what reads it, and the arguments of ``install``."""
    our_flags.register(__file__)
    options.register(read)
    options.register_flags(_flags)
    options.register_argument(options.Argument("order", with_order, default=by_default))
    options.register_argument(options.Argument("lengths", with_lengths))
    for flag in (FLAG, *PACKED):
        other_sums.register(replace(SUMS, flag=flag))
