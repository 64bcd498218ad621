"""Replace names in Megatron, all of them or none, and put them back.

A hook says what it replaces, ``seams`` lists all hooks, and this module puts them in place.  All seams are
checked before the first is touched: a Megatron that has moved one of them is refused whole and stays stock.
A name is replaced in every module that has imported it, whichever package that is of.
"""

import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import ismodule
from types import ModuleType
from typing import Any

from megatron_pp_ext.around import around
from megatron_pp_ext.integration import releases
from megatron_pp_ext.integration.releases import OLDEST


class SeamError(RuntimeError):
    """Megatron does not look as expected; nothing was patched."""


@dataclass(frozen=True, slots=True)
class Seam:
    """One name to replace: ``module:name``, where the name may be that of a method, ``Class.method``.

    ``known`` maps each release that brought a new list of parameters to that list, in order and separated by
    spaces, or to None where it removed the place.  The parameters are those of the function, or of the
    class's ``forward`` where the name is an autograd function.  Before the first of these releases Megatron
    has no such place.  ``wrap`` is the hook: it takes what is there and returns what goes in its place.
    ``why`` says what the hook is for.
    """

    place: str
    known: Mapping[releases.Number, str | None]
    wrap: Callable[[Any], Any]
    why: str

    @property
    def path(self) -> str:
        """The place as it would be written in Python."""
        return self.place.replace(":", ".")

    @property
    def module(self) -> str:
        """The module that defines the name."""
        return self.place.partition(":")[0]

    @property
    def name(self) -> str:
        """The name within its module."""
        return self.place.partition(":")[2]

    def since(self, release: releases.Number) -> releases.Number | None:
        """Return the release that brought the parameters of ``release``; None if that has no such place."""
        since = max((since for since in self.known if since <= release), default=None)
        return None if since is None or self.known[since] is None else since

    def find(self) -> Any:
        """Return what is there now; raise SeamError unless it has the parameters known of this release."""
        try:
            target = operator.attrgetter(self.name)(importlib.import_module(self.module))
        except (ImportError, AttributeError) as error:
            raise SeamError(f"{self.path} is not there ({error}); {_advice()}") from error
        since = self.since(releases.megatron_release())
        known = self.known[since] if since else None
        found = " ".join(inspect.signature(getattr(target, "forward", target)).parameters)
        if found != known:
            raise SeamError(f"{self.path} takes ({found}) where ({known}) was known; {_advice()}")
        return target


@dataclass(frozen=True, slots=True)
class Hook:
    """What goes to the places of ``seams``."""

    wrap: Callable[[Any], Any]
    seams: tuple[Seam, ...]

    def __call__(self, stock: Any) -> Any:
        """Return what takes the place of ``stock``."""
        return self.wrap(stock)


Known = str | Mapping[releases.Number, str | None]
"""The parameters of a place as in ``Seam``, or those that it has in all releases."""


def hook(place: str, known: Known, why: str) -> Callable[[Callable[..., Any] | Hook], Hook]:
    """Let the decorated ``call(stock, *arguments)`` be the calls of the function at ``place``; see ``Seam``.

    A hook that is decorated again has more places.
    """
    return lambda call: substitute(place, known, why)(call if isinstance(call, Hook) else around(call))


def substitute(place: str, known: Known, why: str) -> Callable[[Callable[[Any], Any] | Hook], Hook]:
    """Let what the decorated function returns, called with what is there, go to ``place``; see ``Seam``."""
    since = {OLDEST: known} if isinstance(known, str) else known

    def decorate(wrap: Callable[[Any], Any] | Hook) -> Hook:
        made = wrap if isinstance(wrap, Hook) else Hook(wrap, ())
        return Hook(made.wrap, (Seam(place, since, made.wrap, why), *made.seams))

    return decorate


def seams_of(*modules: ModuleType) -> tuple[Seam, ...]:
    """Return the seams of the hooks that ``modules`` have, in their order."""
    hooks = (value for module in modules for value in vars(module).values() if isinstance(value, Hook))
    return tuple(seam for one in hooks for seam in one.seams)


def require_known_release() -> None:
    """Raise SeamError for a Megatron on which no seam was ever tried."""
    if releases.megatron_release() not in [release.number for release in releases.RELEASES]:
        raise SeamError(_advice())


def seams_of_this_release(seams: Iterable[Seam]) -> list[Seam]:
    """Return those of ``seams`` whose place the Megatron that would be imported should have."""
    release = releases.megatron_release()
    return [seam for seam in seams if seam.since(release)]


def _advice() -> str:
    known = ", ".join("{}.{}.x".format(*release.number) for release in releases.RELEASES)
    return (
        f"megatron-core is {releases.own_megatron_version()}, known are {known}: "
        "install one of these, or run the script without megatron_pp_ext"
    )


_applied: list[tuple[str, Any, str, Any]] = []
"""(seam, module or class, name, what was there) of every replaced name, in order."""


def apply(seams: Iterable[Seam]) -> None:
    """Replace all ``seams`` that this release has, or none and raise SeamError.

    Seams that are replaced already are left as they are.
    """
    require_known_release()
    found = [(seam, seam.find()) for seam in seams_of_this_release(seams) if not is_applied(seam)]
    before = len(_applied)
    known_as = _names_of(target for _, target in found)
    try:
        for seam, target in found:
            replacement = seam.wrap(target)
            owner, _, attribute = seam.name.rpartition(".")
            # A method is known by one name, its class's; a function also by those of its importers.
            holders = (
                [(operator.attrgetter(owner)(sys.modules[seam.module]), attribute)]
                if owner
                else known_as[id(target)]
            )
            for holder, name in holders:
                # A class may hold a staticmethod around the target, which has to be put back.
                _applied.append((seam.path, holder, name, vars(holder).get(name, target)))
                setattr(holder, name, replacement)
    except BaseException:
        undo(keep=before)
        raise


def undo(keep: int = 0) -> None:
    """Put back everything that ``apply`` replaced, but for the first ``keep`` names.

    Modules that took a replacement by name since then get back what was there, too.
    """
    # A method has no other name than its class's.
    functions = [vars(holder).get(name) for _, holder, name, _ in _applied[keep:] if ismodule(holder)]
    taken = _names_of(functions)
    while len(_applied) > keep:
        _, holder, name, target = _applied.pop()
        for module, known_as in taken.get(id(vars(holder).get(name)), ()):
            setattr(module, known_as, target)
        setattr(holder, name, target)


def applied() -> int:
    """Return how many names are replaced at this moment, for ``undo`` to keep."""
    return len(_applied)


def is_applied(seam: Seam) -> bool:
    """Return whether ``seam`` is replaced at this moment."""
    return any(path == seam.path for path, *_ in _applied)


def _names_of(targets: Iterable[Any]) -> dict[int, list[tuple[Any, str]]]:
    """Return, by each target's identity, the (module, name) pairs under which modules hold it.

    Modules are looked through without their own ``__getattr__``, by which some import others when asked.
    """
    wanted = list(targets)
    known_as: dict[int, list[tuple[Any, str]]] = {id(target): [] for target in wanted}
    kinds = {type(target) for target in wanted}
    for module in list(sys.modules.values()):
        if ismodule(module):
            for name, value in list(vars(module).items()):
                # The type first: id() runs audit hooks, and there are half a million names.
                if type(value) in kinds and id(value) in known_as:
                    known_as[id(value)].append((module, name))
    return known_as
