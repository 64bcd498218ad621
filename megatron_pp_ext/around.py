"""Hooks that are written as the code around one call of the function that they replace."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def around(hook: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the ``wrap`` of a patch: a call of the wrapped ``stock`` becomes ``hook(stock, *arguments)``."""

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
