"""Hooks that are written as what happens around one call of the function that they go around."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def around(hook: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let ``hook(stock, *arguments)`` be the calls of what is made of ``stock``: the ``wrap`` of a patch."""

    @functools.wraps(hook)
    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return hook(stock, *args, **kwargs)

        return replaced

    return wrap


def bound(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """Return the arguments of a call of ``stock`` by name, to read or change them before it is called."""
    return inspect.signature(stock).bind(*args, **kwargs)
