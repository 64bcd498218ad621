"""What --pipeline-order and --pipeline-slice-tokens request, and the arguments of ``install`` for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from megatron_pp_ext.compiler.request import Option, Request
from megatron_pp_ext.features.units.orders import How
from megatron_pp_ext.features.units.rates import EQUAL_AT, OVERHEAD, LengthCosts
from megatron_pp_ext.features.units.rules import ranks_of_sequence
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.entry import AUTO
from megatron_pp_ext.setting_error import SettingError

ORDER_FLAG, SLICE_FLAG, OFF = "--pipeline-order", "--pipeline-slice-tokens", "off"

SMALLEST = 512
"""The fewest tokens of a slice that is tried where the number is open."""

NOMINAL = 4
"""The slices of a sequence whose length is not known yet, in the plan that decides on the placement."""

LengthsOf = Callable[[Any], Sequence[int]]
"""What a data iterator yields for a microbatch -> the lengths of its documents in tokens."""

_PACKED = "cu_seqlens", "cu_seqlens_q"
_TOKENS = "tokens", "input_ids"


def lengths_of_batch(batch: Any) -> list[int]:
    """Return the document lengths of a batch as Megatron's datasets yield it.

    A packed one states where documents end; any other has a document in each row, which may be those of a
    nested tensor of jagged layout.  ValueError for anything else.
    """
    if isinstance(batch, Mapping):
        for name in _PACKED:
            if (ends := batch.get(name)) is not None and hasattr(ends, "flatten"):
                numbers = ends.flatten().tolist()
                # Padding repeats the last end.
                return [end - start for start, end in pairwise(numbers) if end > start]
        for name in _TOKENS:
            tokens: Any = batch.get(name)
            if len(getattr(tokens, "shape", ())) == 2:
                if getattr(tokens, "is_nested", False):  # rows of unlike length, as verl's
                    return [len(row) for row in tokens.unbind()]
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

    evaluates: ClassVar[bool] = True
    """Evaluations, too, read ahead where their sequences are cut."""

    @property
    def about(self) -> str:
        if self.how == "given":
            return "microbatches in the order of the data"
        how = "by the rule of the schedule" if self.how == "rule" else "as a search finds"
        costs = f"costs from {self.costs_from}" if self.costs_from else "costs of the model's layers"
        return f"microbatches of unlike length ordered {how}, {costs}"


@dataclass(frozen=True, slots=True)
class Slices(Option):
    """The request for slices of at most ``tokens`` tokens of sequences of ``length`` tokens.

    ``tokens`` are None as long as they are to be chosen, and ``length`` is 0 as long as it is not known: a
    call of ``install`` knows no model.  A microbatch has ``rows`` sequences, of which slices end at a
    ``multiple`` of so many tokens, and each slice costs ``overhead`` tokens on top of its own.  Where no
    costs by length are known, attention of ``equal_at`` tokens takes as long as all else.  ``rates`` are such
    costs where a caller has them already.
    """

    tokens: int | None
    length: int = 0
    rows: int = 1
    multiple: int = 1
    overhead: float = OVERHEAD
    equal_at: float = EQUAL_AT
    rates: LengthCosts | None = None

    evaluates: ClassVar[bool] = True
    is_planned: ClassVar[bool] = True

    @property
    def cuts(self) -> bool:
        """Whether sequences of the step are cut."""
        return self.tokens is None or not 0 < self.length <= self.tokens

    @property
    def word(self) -> str:
        return f"slices{self.tokens}" if self.tokens and self.cuts else ""

    @property
    def about(self) -> str:
        if not self.length:
            return f"planned for {NOMINAL} slices of each sequence until the model is known"
        if not (self.tokens and self.cuts):
            return ""
        return f"sequences in slices of at most {self.tokens} tokens and equal cost"


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
        raise SettingError(f"--pipeline-order is {how!r}; give 'given', 'rule' or 'search'")
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
    return request.with_option(Slices(read_tokens(tokens)))


def with_check(request: Request, check: str, limit: float | str | None = None) -> Request:
    """Return ``request`` with or without the check of slices; ValueError, in one line, for another word."""
    if check not in ("on", OFF):
        raise SettingError(f"--pipeline-slice-check is {check!r}; give 'on' or '{OFF}', or leave it out")
    return request.with_option(Unchecked()) if check == OFF else request


def read_tokens(tokens: int | str) -> int | None:
    """Return the tokens of a slice, None for ``auto``; ValueError, in one line, for anything else."""
    if tokens == AUTO:
        return None
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise SettingError(
            f"{SLICE_FLAG} is {tokens!r}, but must be a whole number from 1 on, or {AUTO}; give one, such "
            "as 4096"
        )
    return tokens


def job_slices(job: Job, tokens: int | None) -> Slices:
    """Return slices of so many ``tokens`` of the sequences of ``job``; None leaves the number open."""
    rows = job.batch.micro_batch_size or 1
    return Slices(tokens, job.model.seq_length or 0, rows, ranks_of_sequence(job))


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
    return request.with_option(job_slices(job, read_tokens(tokens)))


def sizes(length: int, multiple: int = 1) -> list[int]:
    """Return the tokens of slices that ``auto`` tries: the whole ``length``, its half and so on.

    None but the whole is below ``SMALLEST``.  They are multiples of ``multiple``, which divides the length.
    """
    blocks, steps = length // multiple, range(1, max(1, length // SMALLEST).bit_length())
    return [length, *(-(-blocks >> step) * multiple for step in steps)]


def as_flags(request: Request) -> Mapping[str, Any]:
    """Return the flags that would request the same, by the names of their arguments."""
    ordering, option = request.option(Ordering), request.option(Slices)
    return {
        "pipeline_order": None if ordering is None else ordering.how,
        "pipeline_slice_tokens": None if option is None else option.tokens or AUTO,
        "pipeline_slice_check": None if request.option(Unchecked) is None else OFF,
    }
