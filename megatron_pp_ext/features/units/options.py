"""What --pipeline-order and --pipeline-slice-tokens request, and the arguments of ``install`` for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from megatron_pp_ext.compiler.request import Option, Request
from megatron_pp_ext.features.units.orders import How
from megatron_pp_ext.features.units.units import Units, equal_slices
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.entry import AUTO
from megatron_pp_ext.setting_error import SettingError

ORDER_FLAG, SLICE_FLAG, OFF = "--pipeline-order", "--pipeline-slice-tokens", "off"

SMALLEST = 512
"""The fewest tokens of a slice that is tried where the number is open."""

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

    ``costs_from`` is the file with what the stages cost at one length; empty where the model has them, or a
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


@dataclass(frozen=True, slots=True)
class Slices(Option):
    """The request for slices of ``tokens`` tokens, of which every sequence has ``count``.

    ``tokens`` are None as long as they are to be chosen, and ``count`` is 1 as long as the length of the
    sequences is not known: a call of ``install`` knows no model.
    """

    tokens: int | None
    count: int = 1

    evaluates: ClassVar[bool] = True

    @property
    def word(self) -> str:
        return "" if self.count == 1 else f"slices{self.count}"

    @property
    def about(self) -> str:
        return "" if self.count == 1 else f"sequences in {self.count} slices of {self.tokens} tokens"

    def units(self, microbatches: int) -> Units:
        """Return the units of a step with so many ``microbatches`` of one sequence length."""
        assert self.tokens is not None
        return equal_slices(microbatches, self.count, self.tokens * self.count)


@dataclass(frozen=True, slots=True)
class Unchecked(Option):
    """The request to train a model without the check that slices know all that meets along a sequence."""


def are_by_length(request: Request) -> bool:
    """Whether units are planned in each step, by the lengths of its sequences."""
    ordering = request.option(Ordering)
    return request.option(Slices) is not None and ordering is not None and ordering.how != "given"


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


def with_slices(request: Request, tokens: int | str, limit: float | str | None = None) -> Request:
    """Return ``request`` with slices of so many tokens, of sequences whose length is not known."""
    return request.with_option(slices(tokens, 0))


def with_check(request: Request, check: str, limit: float | str | None = None) -> Request:
    """Return ``request`` with or without the check of slices; ValueError, in one line, for another word."""
    if check not in ("on", OFF):
        raise SettingError(f"--pipeline-slice-check is {check!r}; give 'on' or '{OFF}', or leave it out")
    return request.with_option(Unchecked()) if check == OFF else request


def slices(tokens: int | str, sequence: int) -> Slices:
    """Return slices of ``tokens`` tokens of sequences of ``sequence`` tokens, 0 where that is not known.

    Where ``tokens`` is ``auto`` they are whole sequences until it is resolved (``choices``).  ValueError, in
    one line, for any other text, a number that is not above 0, and one that does not divide the sequence.
    """
    if tokens == AUTO:
        return Slices(None)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise SettingError(
            f"{SLICE_FLAG} is {tokens!r}, but must be a whole number from 1 on, or {AUTO}; give one, such "
            "as 4096"
        )
    if not sequence or tokens >= sequence:
        return Slices(tokens)
    if sequence % tokens:
        raise SettingError(
            f"{SLICE_FLAG} is {tokens}, which does not divide the {sequence} tokens of a sequence; give a "
            "divisor"
        )
    return Slices(tokens, sequence // tokens)


def read_order(job: RequestedJob, request: Request) -> Request:
    """Return ``request`` with the order that the flags ask for; a call's is there already."""
    how = job.flags.pipeline_order
    if how is None or request.is_stock or request.option(Ordering) is not None:
        return request
    file = job.pipeline.pipeline_costs
    return request.with_option(Ordering(how, costs_from="" if file is None else f"--pipeline-costs {file}"))


def read_slices(job: RequestedJob, request: Request) -> Request:
    """Return ``request`` with the slices that the flags ask for."""
    tokens = job.pipeline.pipeline_slice_tokens
    if tokens is None:
        return request
    if job.pipeline.pipeline_slice_check == OFF:
        request = request.with_option(Unchecked())
    option = slices(tokens, 0)
    if are_by_length(request.with_option(option)):
        return request.with_option(option)
    return request.with_option(slices(tokens, job.model.seq_length))


def choices(job: Job) -> tuple[Slices | None, ...]:
    """Return the slices in the candidates of a search, None for whole sequences.

    ``auto`` gives whole sequences, and halves of them, of these and so on.  ValueError for a number that does
    not divide the sequences.
    """
    tokens, length = job.pipeline.pipeline_slice_tokens, job.model.seq_length
    if tokens is None:
        return (None,)
    if tokens != AUTO:
        option = slices(tokens, length)
        return (option if option.count > 1 else None,)
    counts = [1 << step for step in range(1, max(1, length // SMALLEST).bit_length())]
    return (None, *(Slices(length // count, count) for count in counts if length % count == 0))


def as_flags(request: Request) -> Mapping[str, Any]:
    """Return the flags that would request the same, by the names of their arguments."""
    ordering, option = request.option(Ordering), request.option(Slices)
    return {
        "pipeline_order": None if ordering is None else ordering.how,
        "pipeline_slice_tokens": None if option is None else option.tokens or AUTO,
        "pipeline_slice_check": None if request.option(Unchecked) is None else OFF,
    }
