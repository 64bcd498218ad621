"""What --pipeline-slice-tokens, or ``install(slice_tokens=)``, requests: sequences in slices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_pp_ext.compiler.request import Option, Request
from megatron_pp_ext.features.lengths.ordering import Ordering
from megatron_pp_ext.features.slices.units import Units, equal_slices
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.names import AUTO
from megatron_pp_ext.setting_error import SettingError

FLAG, OFF = "--pipeline-slice-tokens", "off"


@dataclass(frozen=True, slots=True)
class Slices(Option):
    """The request for slices of ``tokens`` tokens, of which every sequence has ``count``.

    ``tokens`` are None as long as they are to be chosen, and ``count`` is 1 as long as the length of the
    sequences is not known: a call of ``install`` knows no model.
    """

    tokens: int | None
    count: int = 1

    evaluates: ClassVar[bool] = True
    orders_lengths: ClassVar[bool] = True

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


def slices(given: int | str, sequence: int) -> Slices:
    """Return slices of ``given`` tokens of sequences of ``sequence`` tokens, 0 where that is not known.

    Where ``given`` is ``auto`` they are whole sequences until it is settled (``costs.choice``).  ValueError,
    in one line, for any other text, a number that is not above 0, and one that does not divide the sequence.
    """
    if given == AUTO:
        return Slices(None)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise SettingError(
            f"{FLAG} is {given!r}, but must be a whole number from 1 on, or {AUTO}; give one, such as 4096"
        )
    if not sequence or given >= sequence:
        return Slices(given)
    if sequence % given:
        raise SettingError(
            f"{FLAG} is {given}, which does not divide the {sequence} tokens of a sequence; give a divisor"
        )
    return Slices(given, sequence // given)


def read(asked: RequestedJob, request: Request) -> Request:
    """Return ``request`` with what the flags say."""
    given = asked.pipeline.pipeline_slice_tokens
    assert given is not None
    if asked.pipeline.pipeline_slice_check == OFF:
        request = request.with_option(Unchecked())
    option = slices(given, 0)
    if are_by_length(request.with_option(option)):
        return request.with_option(option)
    return request.with_option(slices(given, asked.model.seq_length))


SMALLEST = 512
"""The fewest tokens of a slice that is tried where the number is open."""


def choices(job: Job) -> tuple[Slices | None, ...]:
    """Return the slices in the candidates of a search, None for whole sequences.

    ``auto`` gives whole sequences, and halves of them, of these and so on.  ValueError for a number that does
    not divide the sequences.
    """
    given, length = job.pipeline.pipeline_slice_tokens, job.model.seq_length
    if given is None:
        return (None,)
    if given != AUTO:
        found = slices(given, length)
        return (found if found.count > 1 else None,)
    counts = [1 << step for step in range(1, max(1, length // SMALLEST).bit_length())]
    return (None, *(Slices(length // count, count) for count in counts if length % count == 0))


def as_flags(request: Request) -> Mapping[str, Any]:
    """Return the flags that would request the same, by the names of their arguments."""
    found = request.option(Slices)
    return {
        "pipeline_slice_tokens": None if found is None else found.tokens or AUTO,
        "pipeline_slice_check": None if request.option(Unchecked) is None else OFF,
    }


def read_argument(request: Request, given: int | str, limit: float | str | None) -> Request:
    """Return ``request`` with what the argument ``slice_tokens`` of ``install`` asks for."""
    return request.with_option(slices(given, 0))


def read_check(request: Request, given: str, limit: float | str | None) -> Request:
    """Return ``request`` with what the argument ``slice_check`` of ``install`` asks for."""
    if given not in ("on", OFF):
        raise SettingError(f"--pipeline-slice-check is {given!r}; give 'on' or '{OFF}', or leave it out")
    return request.with_option(Unchecked()) if given == OFF else request
