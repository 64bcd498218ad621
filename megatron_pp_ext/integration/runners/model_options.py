"""What features read off a built model that its schedules depend on, and how they register it."""

from collections.abc import Callable, Sequence
from typing import Any

from megatron_pp_ext.compiler.request import Option
from megatron_pp_ext.registered import Registered

Read = Callable[[Sequence[Any]], Option | None]
"""Returns the option of a request that the chunks of a model ask for (``Request.with_option``), or None.

It must be the same on all ranks of the job, and can be hashed.
"""

_registered = Registered[Read]()
register = _registered.add
"""Adds a ``Read``, which sees the model of every schedule that is made from now on."""


def model_options(model: Sequence[Any]) -> tuple[Option, ...]:
    """Return the options that features read off the chunks of ``model``."""
    return tuple(option for read in _registered if (option := read(model)) is not None)
