"""How features choose what their flags leave open, by the costs of the model that trains."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.registered import Registered

Read = Callable[[RequestedJob], Request]
"""Returns what a job requests; ValueError, in one line, if that cannot be."""

Rows = Callable[[], int]
"""Returns the rows of the model's embedding; ValueError, in one line, where nothing states them."""

Choose = Callable[[RequestedJob, Read, Rows], Mapping[str, Any]]
"""Returns the flags of a feature that are open, by the names of their arguments, with the chosen values.

It is empty where none is open.  ValueError, in one line, where no value is possible.
"""

_registered = Registered[Choose]()
register = _registered.add
"""Adds a ``Choose``, which settles its flags in training, after ``install`` and in estimates from now on."""


def chosen(asked: RequestedJob, read: Read, rows: Rows) -> dict[str, Any]:
    """Return all flags that ``asked`` leaves open, by the names of their arguments, with the chosen values.

    A feature sees what those before it chose.  ValueError, in one line, where one has no possible value.
    """
    found: dict[str, Any] = {}
    for one in _registered:
        found |= one(asked.with_arguments(**found), read, rows)
    return found
