"""Functions that are hooked here and that another package has wrapped or replaced too."""

import functools
import sys
from collections.abc import Iterable, Iterator
from inspect import ismodule
from typing import Any, NamedTuple

from megatron_pp_ext.megatron import patching

_OURS = __name__.partition(".")[0]

_MEGATRON = ("megatron.core", "megatron.training", "megatron.legacy")

_COMMON = ("builtins", "contextlib", "functools", "torch")
"""The packages of decorators and functions that Megatron itself has under its names."""

IN_PLACE, AROUND, LATER = "stands in its place", "wraps it", "stands in the place of this package's hook"


class OtherPatch(NamedTuple):
    """A function that another package changed: where it is, the package's function, and what that does."""

    where: str
    function: str
    change: str


def others(hooks: Iterable[patching.Hook]) -> list[OtherPatch]:
    """Return what other packages have changed of the functions that ``hooks`` replace, each once.

    Modules that import a function by name, and hold another package's, count too.  What is imported later is
    not seen.
    """
    patches = dict.fromkeys(patch for hook in hooks for patch in _of_hook(hook))
    return list(patches)


def _of_hook(hook: patching.Hook) -> Iterator[OtherPatch]:
    for place in hook.places:
        try:
            target = patching.target_of(place)
        except (ImportError, AttributeError):
            continue
        owners = (*_MEGATRON, ".".join(place.module.split(".")[:2]))
        yield from _around(place.dotted, target, owners, is_hooked=place.path in patching.places_replaced())
        if "." in place.name:
            continue
        for module in list(sys.modules.values()):
            if ismodule(module) and _is_of(module.__name__, owners) and module.__name__ != place.module:
                value = vars(module).get(place.name)
                if value is not None and value is not target:
                    yield from _around(f"{module.__name__}.{place.name}", value, owners, is_hooked=False)


def _around(where: str, value: Any, owners: tuple[str, ...], is_hooked: bool) -> Iterator[OtherPatch]:
    """Yield the functions of others among those that a call of ``value`` goes through, the first first."""
    layers = [(_origin(layer), _file(layer)) for layer in _layers(value)]
    for at, ((module, name), file) in enumerate(layers):
        if _is_of(module, (_OURS, *_COMMON)) or (_is_of(module, owners) and not file):
            continue
        inner = [origin for (origin, _), _ in layers[at + 1 :]]
        change = AROUND if any(_is_of(origin, (_OURS, *owners)) for origin in inner) else IN_PLACE
        if is_hooked and not any(_is_of(origin, (_OURS,)) for (origin, _), _ in layers):
            change = LATER
        yield OtherPatch(where, f"{module}.{name}{f' of {file}' if file else ''}", change)


def _layers(value: Any) -> Iterator[Any]:
    """Yield ``value`` and what it wraps, as ``functools.wraps`` notes it."""
    seen = set[int]()
    while value is not None and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, functools.partial):
            value = value.func
            continue
        value = getattr(value, "__func__", value)
        yield value
        value = getattr(value, "__wrapped__", None)


def _origin(value: Any) -> tuple[str, str]:
    """Return the module and the name of a function where its code is: ``functools.wraps`` changes both."""
    if (code := getattr(value, "__code__", None)) is not None:
        return str(value.__globals__.get("__name__", "")), code.co_qualname
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__, kind.__qualname__


def _file(value: Any) -> str:
    """Return the file of a function's code where that is not the one of its module; empty otherwise."""
    module = sys.modules.get(_origin(value)[0])
    file, code = getattr(module, "__file__", None), getattr(value, "__code__", None)
    return "" if file is None or code is None or code.co_filename == file else str(code.co_filename)


def _is_of(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
