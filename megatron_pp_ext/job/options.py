"""How features read what is requested of them: the registry that ``job.pipeline`` and ``job.call`` ask."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.job.rules.asked import Asked

Read = Callable[[Asked, Request], Request]
"""Adds to a request what the flags of a feature say (``Request.with_option``).

ValueError, in one line, if that cannot be.
"""

Flags = Callable[[Request], Mapping[str, Any]]
"""Returns the flags that would request the same of a feature, by the names of their arguments."""

Permitted = Callable[[Asked], Mapping[str, Any]]
"""Returns the flags of a feature, by the names of their arguments, as the other flags permit them."""

Argument = Callable[[Request, Any], Request]
"""Adds to a request what an argument of ``megatron_pp_ext.install`` says, None where it is left out.

ValueError, in one line, if that cannot be.
"""


def _no_flags(asked: Asked | Request) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class _Reader:
    read: Read
    permitted: Permitted
    flags: Flags
    arguments: Mapping[str, Argument]


_registered: list[_Reader] = []


def register(
    read: Read,
    *,
    permitted: Permitted = _no_flags,
    flags: Flags = _no_flags,
    arguments: Mapping[str, Argument] | None = None,
) -> None:
    """Let ``read`` see the flags of every schedule that is requested from now on.

    ``flags`` is its inverse, and ``arguments`` are those of a call that mean the same.  A search that
    chooses what flags leave open asks for ``permitted`` ones.
    """
    if all(one.read is not read for one in _registered):
        _registered.append(_Reader(read, permitted, flags, arguments or {}))


def read(asked: Asked, request: Request) -> Request:
    """Return ``request`` with the options of all features."""
    for one in _registered:
        request = one.read(asked, request)
    return request


def permitted(asked: Asked) -> dict[str, Any]:
    """Return the flags of features as the other flags permit them, by the names of their arguments."""
    return {name: value for one in _registered for name, value in one.permitted(asked).items()}


def as_flags(request: Request) -> dict[str, Any]:
    """Return the flags of features that would request the same, by the names of their arguments."""
    return {name: value for one in _registered for name, value in one.flags(request).items()}


def arguments() -> dict[str, Argument]:
    """Return the arguments of a call that features read."""
    return {name: argument for one in _registered for name, argument in one.arguments.items()}
