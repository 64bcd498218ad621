"""What --pipeline-vocabulary, or ``install(vocabulary=)``, requests: a split head, or the choice of one."""

from dataclasses import dataclass, replace

from megatron_pp_ext.compiler.request import Option, Request
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.entry import AUTO
from megatron_pp_ext.setting_error import SettingError

SHARED = "shared"
"""Every rank has an equal part of the vocabulary."""


@dataclass(frozen=True, slots=True)
class FrozenOutput(Option):
    """An option of a request: the weight of the output layer is frozen, and has no gradient."""


def with_vocabulary(request: Request, value: str | None) -> Request:
    """Return ``request`` with the ``value`` of the flag, None where it is left out.

    SettingError for any other value.
    """
    if value not in (None, SHARED, AUTO):
        raise SettingError(
            f"--pipeline-vocabulary is {value!r}; give {SHARED!r} or {AUTO!r}, or leave it out"
        )
    return replace(request, splits_head=None if value == AUTO else value == SHARED)


def permitted(job: RequestedJob) -> str | None:
    """Return the value of the flag, but None where other flags leave ``AUTO`` no choice."""
    value = job.pipeline.pipeline_vocabulary
    return None if value == AUTO and not all_rules.has_choice(job, "--pipeline-vocabulary") else value


def as_flag(request: Request) -> str | None:
    """Return the value of the flag that would request the same."""
    return AUTO if request.splits_head is None else SHARED if request.splits_head else None


def choices(job: Job) -> tuple[bool, ...]:
    """Return whether ranks share the vocabulary in the candidates of a search, ``AUTO`` gives both."""
    value = job.pipeline.pipeline_vocabulary
    return (False, True) if value == AUTO else (value == SHARED,)
