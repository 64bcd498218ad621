"""Replace names in Megatron, all of them or none, and put them back.

A hook says what it replaces, ``seams`` lists all hooks, and this module puts them in place.  All seams are
checked before the first is touched: a Megatron that has moved one of them is refused whole and stays stock.
A name is replaced in every module that has imported it, whichever package that is of.
"""

import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import ismodule
from types import MappingProxyType, ModuleType
from typing import Any

from megatron_pp_ext.around import around
from megatron_pp_ext.integration import places, releases, tried
from megatron_pp_ext.integration.places import Known, ParametersOf, Place, SeamError


@dataclass(frozen=True, slots=True)
class Seam:
    """One function to replace.

    ``places`` are where Megatrons have it, the newest first: the first that is there is replaced.  ``wrap``
    is the hook: it takes what is there and returns what goes in its place.  ``why`` says what the hook is
    for.  ``since`` is the release from which on every Megatron has the function, None if all have it.
    """

    places: tuple[Place, ...]
    wrap: Callable[[Any], Any]
    why: str
    since: releases.Number | None = None

    def in_megatron(self, parameters_of: ParametersOf, release: releases.Number) -> Place | None:
        """Return the place that is replaced in a Megatron; None if it is too old to have the function.

        Raise SeamError if it does not fit.
        """
        return places.choose(self.places, parameters_of, self.since, release)

    def here(self) -> Place | None:
        """Return the place that is replaced in the Megatron that is imported here; see ``in_megatron``."""
        return self.in_megatron(places.parameters_here, releases.megatron_release())


@dataclass(frozen=True, slots=True)
class Hook:
    """What goes to the places of ``seams``."""

    wrap: Callable[[Any], Any]
    seams: tuple[Seam, ...]
    ordered: int | None
    """As in ``Place``."""

    def __call__(self, stock: Any) -> Any:
        """Return what takes the place of ``stock``."""
        return self.wrap(stock)


_NOWHERE: Mapping[str, Known] = MappingProxyType({})


def hook(
    place: str,
    known: Known,
    why: str,
    *,
    before: Mapping[str, Known] = _NOWHERE,
    since: releases.Number | None = None,
) -> Callable[[Callable[..., Any] | Hook], Hook]:
    """Let the decorated ``call(stock, *arguments)`` be the calls of the function at ``place``.

    ``known`` are the parameters that the function has, or each list of them where Megatrons differ, of which
    the order counts as far as ``call`` names its arguments.  ``before`` has the places where older Megatrons
    have the function, and ``since`` is as in ``Seam``.  A hook that is decorated again replaces more
    functions.
    """

    def decorate(call: Callable[..., Any] | Hook) -> Hook:
        made = call if isinstance(call, Hook) else Hook(around(call), (), _named_arguments(call))
        return substitute(place, known, why, before=before, since=since)(made)

    return decorate


def substitute(
    place: str,
    known: Known,
    why: str,
    *,
    before: Mapping[str, Known] = _NOWHERE,
    since: releases.Number | None = None,
) -> Callable[[Callable[[Any], Any] | Hook], Hook]:
    """Let what the decorated function returns, called with what is there, go to ``place``; see ``hook``."""

    def decorate(wrap: Callable[[Any], Any] | Hook) -> Hook:
        made = wrap if isinstance(wrap, Hook) else Hook(wrap, (), None)
        seam = Seam(places.places(place, known, before, made.ordered), made.wrap, why, since)
        return Hook(made.wrap, (seam, *made.seams), made.ordered)

    return decorate


def _named_arguments(call: Callable[..., Any]) -> int:
    """Return how many arguments after ``stock`` a hook takes by names of its own."""
    _, *arguments = inspect.signature(call).parameters.values()
    return sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in arguments)


def seams_of(*modules: ModuleType) -> tuple[Seam, ...]:
    """Return the seams of the hooks that ``modules`` have, in their order."""
    hooks = (value for module in modules for value in vars(module).values() if isinstance(value, Hook))
    return tuple(seam for one in hooks for seam in one.seams)


def require_known_release(by_flags: bool = False) -> None:
    """Raise SeamError for a Megatron on which no hook was ever tried.

    Schedules ``by_flags`` need more of Megatron than those of ``megatron_pp_ext.install``.
    """
    here = releases.release_here()
    if here is None or (by_flags and not here.by_flags):
        rows = [row for row in releases.RELEASES if row.by_flags or not by_flags]
        known = ", ".join("{}.{}.x".format(*row.number) for row in rows)
        other = "" if here is None else ", call megatron_pp_ext.install in place of flags"
        raise SeamError(
            f"megatron-core is {releases.own_megatron_version()}, known are {known}: install one of "
            f"these{other}, or run the script without megatron_pp_ext"
        )


_applied: list[tuple[str, Any, str, Any]] = []
"""(place, module or class, name, what was there) of every replaced name, in order."""


def apply(seams: Iterable[Seam]) -> None:
    """Replace all ``seams`` that this Megatron has, or none and raise SeamError, which names each misfit.

    Seams that are replaced already are left as they are.
    """
    require_known_release()
    found: list[tuple[Seam, Place, Any]] = []
    misfits: list[str] = []
    wanted = [seam for seam in seams if not is_applied(seam)]
    for seam in wanted:
        try:
            place = seam.here()
        except SeamError as error:
            misfits.append(str(error))
        else:
            if place is not None:
                found.append((seam, place, places.target_of(place)))
    if misfits:
        raise SeamError(f"{'; '.join(misfits)}; {advice(wanted)}")
    before = len(_applied)
    known_as = _names_of(target for *_, target in found)
    try:
        for seam, place, target in found:
            replacement = seam.wrap(target)
            owner, _, attribute = place.name.rpartition(".")
            # A method is known by one name, its class's; a function also by those of its importers.
            holders = (
                [(operator.attrgetter(owner)(sys.modules[place.module]), attribute)]
                if owner
                else known_as[id(target)]
            )
            for holder, name in holders:
                # A class may hold a staticmethod around the target, which has to be put back.
                _applied.append((place.path, holder, name, vars(holder).get(name, target)))
                setattr(holder, name, replacement)
    except BaseException:
        undo(keep=before)
        raise


_awaited: tuple[Seam, ...] = ()
_optional: tuple[Seam, ...] = ()
"""The seams in packages that this process may import later, and those that need not fit."""


def apply_when_imported(seams: Iterable[Seam], optional: Iterable[Seam]) -> None:
    """Let ``apply_imported`` replace ``seams``, and those of the ``optional`` that fit."""
    global _awaited, _optional
    _awaited, _optional = tuple(seams), tuple(optional)


def apply_imported() -> None:
    """Replace the awaited seams whose packages are imported by now; SeamError where one does not fit."""
    apply([*filter(_is_imported, _awaited), *filter(_fits, filter(_is_imported, _optional))])


def _is_imported(seam: Seam) -> bool:
    return seam.places[0].module in sys.modules


def _fits(seam: Seam) -> bool:
    try:
        return seam.here() is not None
    except SeamError:
        return False


def advice(seams: Iterable[Seam]) -> str:
    """Return what to do where one of ``seams`` does not fit, and the tried commit that comes nearest."""
    paths = [place.path for seam in seams for place in seam.places]
    nearest = tried.nearest({path: places.parameters_here(path) for path in paths})
    return (
        f"this is megatron-core {releases.own_megatron_version()}, nearest to {nearest}, which was tried: "
        "install a Megatron of docs/compatibility.md, or run the script without megatron_pp_ext"
    )


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
    paths = {place.path for place in seam.places}
    return any(path in paths for path, *_ in _applied)


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
