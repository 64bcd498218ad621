"""What --pipeline-vocabulary, or ``install(vocabulary=)``, requests: a split head, or the choice of one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.vocabulary.names import SHARED
from megatron_pp_ext.job import options, other_sums, our_flags
from megatron_pp_ext.job.other_sums import OtherSums
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.names import AUTO
from megatron_pp_ext.setting_error import SettingError

# The parts of the hidden state's gradient are rounded before they are summed.
SUMS = OtherSums(
    "--pipeline-vocabulary", "each rank sums over its part of a shared vocabulary", fp32=1e-5, lower=1e-1
)
"""The sums of a job with the flag."""


def _requested(request: Request, value: str | None) -> Request:
    """Return ``request`` with the ``value`` of the flag, None where it is left out.

    SettingError for any other value.
    """
    if value not in (None, SHARED, AUTO):
        raise SettingError(
            f"--pipeline-vocabulary is {value!r}; give {SHARED!r} or {AUTO!r}, or leave it out"
        )
    return replace(request, splits_head=None if value == AUTO else value == SHARED)


def _permitted(asked: RequestedJob) -> str | None:
    """Return the value of the flag, but None where other flags leave ``AUTO`` no choice."""
    value = asked.job.pipeline.pipeline_vocabulary
    return None if value == AUTO and not all_rules.has_choice(asked, "--pipeline-vocabulary") else value


def read(asked: RequestedJob, request: Request) -> Request:
    """Return ``request`` with what the flag requests; see ``job.options.Read``."""
    return _requested(request, _permitted(asked))


def _flags(request: Request) -> Mapping[str, Any]:
    value = AUTO if request.splits_head is None else SHARED if request.splits_head else None
    return {"pipeline_vocabulary": value}


def choices(job: Job) -> tuple[bool, ...]:
    """Return whether ranks share the vocabulary in the candidates of a search, ``AUTO`` gives both."""
    value = job.pipeline.pipeline_vocabulary
    return (False, True) if value == AUTO else (value == SHARED,)


def _read_argument(request: Request, given: str, limit: float | str | None) -> Request:
    return _requested(request, given)


def register() -> None:
    """Add the flag, what reads it and the argument of ``install``, and what they do to sums."""
    our_flags.register(__file__)
    options.register(read)
    options.register_permitted("pipeline_vocabulary", _permitted)
    options.register_flags(_flags)
    options.register_argument(options.Argument("vocabulary", _read_argument))
    other_sums.register(SUMS)
