"""Places of Megatron's source that hooks take, and the parameters that the hooks know there.

Megatron's development goes on under one version number, so a place is judged by its function.
"""

import importlib
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_pp_ext.integration import releases

Known = str | Sequence[str]
"""The parameters of a function, separated by spaces; a sequence where Megatrons differ."""

ParametersOf = Callable[[str], str | None]
"""Returns the parameters of the function at a place of some Megatron; None if there is none."""


class HookError(RuntimeError):
    """Megatron does not look as expected; nothing was patched."""


@dataclass(frozen=True, slots=True)
class Place:
    """A function or class of Megatron, ``module:name`` or ``module:Class.method``."""

    path: str
    known: tuple[str, ...]
    """The lists of parameters that the hook knows: the ones of ``forward`` where the place has a class of
    autograd functions."""
    ordered: int | None = None
    """How many of the first parameters the hook takes by position, so that their order counts, and that of
    the others does not; None if it is that of all."""

    @property
    def dotted(self) -> str:
        """The place as it would be written in Python."""
        return self.path.replace(":", ".")

    @property
    def module(self) -> str:
        """The module that defines the name."""
        return self.path.partition(":")[0]

    @property
    def name(self) -> str:
        """The name within its module."""
        return self.path.partition(":")[2]

    def require(self, parameters: str) -> None:
        """Raise HookError unless ``parameters`` are one of the known lists."""
        if not any(self._same(parameters.split(), accepted.split()) for accepted in self.known):
            accepted = min(self.known, key=lambda accepted: len({*accepted.split()} ^ {*parameters.split()}))
            raise HookError(f"{self.dotted} takes ({parameters}) where ({accepted}) was known")

    def _same(self, parameters: list[str], accepted: list[str]) -> bool:
        by_position = slice(self.ordered)
        return sorted(parameters) == sorted(accepted) and parameters[by_position] == accepted[by_position]


def places(
    path: str, parameters: Known, before: Mapping[str, Known], ordered: int | None
) -> tuple[Place, ...]:
    """Return the place ``path``, and after it the places of the same function in older Megatrons."""
    by_path = {path: parameters, **before}
    return tuple(
        Place(path, (parameters,) if isinstance(parameters, str) else tuple(parameters), ordered)
        for path, parameters in by_path.items()
    )


def choose(
    places: Sequence[Place],
    parameters_of: ParametersOf,
    since: releases.Number | None,
    release: releases.Number,
) -> Place | None:
    """Return the first of ``places`` that a Megatron has, or None if its ``release`` comes before ``since``.

    Raise HookError if the hook does not know what stands there, or if the function is missing.
    """
    for place in places:
        parameters = parameters_of(place.path)
        if parameters is not None:
            place.require(parameters)
            return place
    if since is not None and release < since:
        return None
    raise HookError(f"{places[0].dotted} is not there")


def target_of(place: Place) -> Any:
    """Return the object at a place of the imported Megatron."""
    return operator.attrgetter(place.name)(importlib.import_module(place.module))


def parameters_here(path: str) -> str | None:
    """Return the parameters in a place of the Megatron that is imported here, by ``ParametersOf``."""
    try:
        target = target_of(Place(path, ()))
    except (ImportError, AttributeError):
        return None
    return " ".join(inspect.signature(getattr(target, "forward", target)).parameters)
