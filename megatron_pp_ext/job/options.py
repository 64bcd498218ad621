"""How features read their flags and arguments: the registries that ``job.pipeline`` and ``job.call`` ask."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.job.requested_job import RequestedJob

Read = Callable[[RequestedJob, Request], Request]
"""Adds to a request what the flags of a feature say (``Request.with_option``).

ValueError, in one line, if that cannot be.
"""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of ``megatron_pp_ext.install`` that is a feature's, and has a flag of the same name.

    ``read`` gets the request, the value and the memory limit of the call, and returns the request with what
    the value says; ValueError, in one line, if that cannot be.  Where ``has_limit`` of a value is true, the
    memory limit is the feature's under schedules that have none.
    """

    name: str
    read: Callable[[Request, Any, float | str | None], Request]
    has_limit: Callable[[Any], bool] = lambda given: False


_registered: list[Read] = []
_arguments: dict[str, Argument] = {}


def register(read: Read) -> None:
    """Let ``read`` see the flags of every schedule that is requested from now on."""
    if read not in _registered:
        _registered.append(read)


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
