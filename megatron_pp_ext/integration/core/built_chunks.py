"""What features do with a rank's chunks as soon as all of them are built, and how they register it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.registered import Registered

Finish = Callable[[Sequence[Any], Pipeline], None]
"""Changes the chunks of this rank in place; all ranks of the pipeline call it at the same time.

It is called before data parallelism wraps the chunks and before tied weights become equal.
"""

_registered = Registered[Finish]()
register = _registered.add
"""Adds a ``Finish``, which is called for every model that is built from now on."""


def finish(chunks: Sequence[Any]) -> None:
    """Let all features do what they registered, with all ``chunks`` of this rank."""
    pipeline = requested.require()
    for one in _registered:
        one(chunks, pipeline)


def finishing(build_chunk: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``build_chunk`` such that the call that builds the last chunk finishes all of them.

    Megatron's own trainer exchanges tied weights right after that call.
    """
    made: list[Any] = []

    @functools.wraps(build_chunk)
    def build(*args: Any, **kwargs: Any) -> Any:
        model = build_chunk(*args, **kwargs)
        made.append(model)
        if len(made) == requested.require().placement.chunks:
            finish(made)
            made.clear()
        return model

    return build
