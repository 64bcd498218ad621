"""How features read their flags: the registry that ``job.pipeline`` asks."""

from collections.abc import Callable

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.job.requested_job import RequestedJob

Read = Callable[[RequestedJob, Request], Request]
"""Adds to a request what the flags of a feature say (``Request.with_option``).

ValueError, in one line, if that cannot be.
"""

_registered: list[Read] = []


def register(read: Read) -> None:
    """Let ``read`` see the flags of every schedule that is requested from now on."""
    if read not in _registered:
        _registered.append(read)


def read(asked: RequestedJob, request: Request) -> Request:
    """Return ``request`` with the options of all features."""
    for one in _registered:
        request = one(asked, request)
    return request
