"""What features do with a rank's chunks as soon as all of them are built."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.integration import requested


def finish(chunks: Sequence[Any]) -> None:
    """Let all features change all ``chunks`` of this rank."""
    pipeline = requested.require()
    for feature in FEATURES:
        feature.finish_chunks(chunks, pipeline)


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
