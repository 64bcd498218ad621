"""How features read their flags and arguments: the registries that ``job.pipeline`` and ``job.call`` ask."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.registered import Registered
from megatron_pp_ext.schedule.names import AUTO

Read = Callable[[RequestedJob, Request], Request]
"""Adds to a request what the flags of a feature request (``Request.with_option``).

ValueError, in one line, if that cannot be.
"""


Permitted = Callable[[RequestedJob], Any]
"""Returns the value of a feature's flag as the other flags permit it."""

Flags = Callable[[Request], Mapping[str, Any]]
"""Returns the flags that would request the same of a feature, by the names of their arguments."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of ``megatron_pp_ext.install`` that is a feature's, and has a flag of the same name.

    ``read`` gets the request, the value and the memory limit of the call, and returns the request with what
    the value requests; ValueError, in one line, if that cannot be.  Where ``has_limit`` of a value is true,
    the memory limit is the feature's under schedules that have none.
    """

    name: str
    read: Callable[[Request, Any, float | str | None], Request]
    has_limit: Callable[[Any], bool] = lambda given: False


_registered = Registered[Read]()
_permitted: dict[str, Permitted] = {}
_flags = Registered[Flags]()
_arguments: dict[str, Argument] = {}

register = _registered.add
"""Adds a ``Read``, which sees the flags of every schedule that is requested from now on."""

register_flags = _flags.add
"""Adds ``Flags``, which candidates and calls without flags ask for those that would request the same."""


def register_permitted(name: str, permitted: Permitted) -> None:
    """Let searches ask ``permitted`` for the value of argument ``name``, of which they choose an ``auto``."""
    _permitted[name] = permitted


def register_argument(argument: Argument) -> None:
    """Let ``argument`` be one of a call from now on."""
    _arguments[argument.name] = argument


def arguments() -> Mapping[str, Argument]:
    """Return the arguments of features by their names."""
    return _arguments


def read(asked: RequestedJob, request: Request) -> Request:
    """Return ``request`` with the options of all features."""
    for one in _registered:
        request = one(asked, request)
    return request


def permitted(asked: RequestedJob) -> dict[str, Any]:
    """Return the flags of features as the other flags permit them, by the names of their arguments."""
    return {name: one(asked) for name, one in _permitted.items()}


def left_open(job: Job) -> tuple[str, ...]:
    """Return the arguments of features whose values a search for ``job`` chooses."""
    return tuple(name for name in _permitted if job.value(name) == AUTO)


def as_flags(request: Request) -> dict[str, Any]:
    """Return the flags of features that would request the same, by the names of their arguments."""
    return {name: value for one in _flags for name, value in one(request).items()}
