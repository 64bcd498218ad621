"""Replace names in Megatron, all of them or none, and put them back.

A hook names the function that it replaces; this module puts hooks in place.  All hooks are
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
from megatron_pp_ext.integration.places import HookError, Known, ParametersOf, Place


@dataclass(frozen=True, slots=True)
class Hook:
    """One function to replace.

    ``places`` are where Megatrons have it, the newest first: the first that is there is replaced.  ``wrap``
    takes the original and returns its replacement.  ``why`` is the hook's purpose.  ``since`` is the release
    from which on every Megatron has the function, None if all have it.
    """

    places: tuple[Place, ...]
    wrap: Callable[[Any], Any]
    why: str
    since: releases.Number | None = None

    def in_megatron(self, parameters_of: ParametersOf, release: releases.Number) -> Place | None:
        """Return the place that is replaced in a Megatron; None if it is too old to have the function.

        Raise HookError if it does not fit.
        """
        return places.choose(self.places, parameters_of, self.since, release)

    def here(self) -> Place | None:
        """Return the place that is replaced in the Megatron that is imported here; see ``in_megatron``."""
        return self.in_megatron(places.parameters_here, releases.megatron_release())


@dataclass(frozen=True, slots=True)
class HookFunction:
    """A decorated function, and the ``hooks`` that put it in Megatron's places."""

    wrap: Callable[[Any], Any]
    hooks: tuple[Hook, ...]
    ordered: int | None
    """As in ``Place``."""

    def __call__(self, stock: Any) -> Any:
        """Return the replacement of ``stock``."""
        return self.wrap(stock)


_NOWHERE: Mapping[str, Known] = MappingProxyType({})


def hook(
    place: str,
    parameters: Known,
    why: str,
    *,
    before: Mapping[str, Known] = _NOWHERE,
    since: releases.Number | None = None,
) -> Callable[[Callable[..., Any] | HookFunction], HookFunction]:
    """Let the decorated ``call(stock, *arguments)`` be the calls of the function at ``place``.

    ``parameters`` are those that the function has, or each list of them where Megatrons differ, of which
    the order counts as far as ``call`` names its arguments.  ``before`` has the places where older Megatrons
    have the function, and ``since`` is as in ``Hook``.  A hook that is decorated again replaces more
    functions.
    """

    def decorate(call: Callable[..., Any] | HookFunction) -> HookFunction:
        wrapped = (
            call if isinstance(call, HookFunction) else HookFunction(around(call), (), _named_arguments(call))
        )
        return substitute(place, parameters, why, before=before, since=since)(wrapped)

    return decorate


def substitute(
    place: str,
    parameters: Known,
    why: str,
    *,
    before: Mapping[str, Known] = _NOWHERE,
    since: releases.Number | None = None,
) -> Callable[[Callable[[Any], Any] | HookFunction], HookFunction]:
    """Replace ``place`` by the decorated function's result, given the original; see ``hook``."""

    def decorate(wrap: Callable[[Any], Any] | HookFunction) -> HookFunction:
        wrapped = wrap if isinstance(wrap, HookFunction) else HookFunction(wrap, (), None)
        hook = Hook(places.places(place, parameters, before, wrapped.ordered), wrapped.wrap, why, since)
        return HookFunction(wrapped.wrap, (hook, *wrapped.hooks), wrapped.ordered)

    return decorate


def _named_arguments(call: Callable[..., Any]) -> int:
    """Return how many arguments after ``stock`` a hook takes by names of its own."""
    _, *arguments = inspect.signature(call).parameters.values()
    return sum(argument.kind is argument.POSITIONAL_OR_KEYWORD for argument in arguments)


def hooks_of(*modules: ModuleType) -> tuple[Hook, ...]:
    """Return the hooks of ``modules``, in their order."""
    functions = (
        value for module in modules for value in vars(module).values() if isinstance(value, HookFunction)
    )
    return tuple(hook for function in functions for hook in function.hooks)


def require_known_release(by_flags: bool = False) -> None:
    """Raise HookError for a Megatron on which no hook was ever tried.

    Schedules ``by_flags`` need more of Megatron than those of ``megatron_pp_ext.install``.
    """
    release = releases.release_here()
    if release is None or (by_flags and not release.by_flags):
        rows = [row for row in releases.RELEASES if row.by_flags or not by_flags]
        releases_text = ", ".join("{}.{}.x".format(*row.number) for row in rows)
        other = "" if release is None else ", call megatron_pp_ext.install in place of flags"
        raise HookError(
            f"megatron-core is {releases.own_megatron_version()}, known are {releases_text}: install one of "
            f"these{other}, or run the script without megatron_pp_ext"
        )


_applied: list[tuple[str, Any, str, Any]] = []
"""(place, module or class, name, original) of every replaced name, in order."""


def apply(hooks: Iterable[Hook]) -> None:
    """Replace all ``hooks`` that this Megatron has, or none and raise HookError, which names each misfit.

    Hooks that are in place already are left as they are.
    """
    require_known_release()
    replacing: list[tuple[Hook, Place, Any]] = []
    misfits: list[str] = []
    missing = [hook for hook in hooks if not is_applied(hook)]
    for hook in missing:
        try:
            place = hook.here()
        except HookError as error:
            misfits.append(str(error))
        else:
            if place is not None:
                replacing.append((hook, place, places.target_of(place)))
    if misfits:
        raise HookError(f"{'; '.join(misfits)}; {advice(missing)}")
    before = len(_applied)
    known_as = _names_of(target for *_, target in replacing)
    try:
        for hook, place, target in replacing:
            replacement = hook.wrap(target)
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


def advice(hooks: Iterable[Hook]) -> str:
    """Return a fix for the case that one of ``hooks`` does not fit, with the nearest tried commit."""
    paths = [place.path for hook in hooks for place in hook.places]
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
    names = _names_of(functions)
    while len(_applied) > keep:
        _, holder, name, target = _applied.pop()
        for module, known_as in names.get(id(vars(holder).get(name)), ()):
            setattr(module, known_as, target)
        setattr(holder, name, target)


def applied() -> int:
    """Return how many names are replaced at this moment, for ``undo`` to keep."""
    return len(_applied)


def is_applied(hook: Hook) -> bool:
    """Return whether ``hook`` is replaced at this moment."""
    paths = {place.path for place in hook.places}
    return any(path in paths for path, *_ in _applied)


def _names_of(targets: Iterable[Any]) -> dict[int, list[tuple[Any, str]]]:
    """Return, by each target's identity, the (module, name) pairs under which modules hold it.

    Modules are looked through without their own ``__getattr__``, by which some import others when asked.
    """
    functions = list(targets)
    known_as: dict[int, list[tuple[Any, str]]] = {id(target): [] for target in functions}
    kinds = {type(target) for target in functions}
    for module in list(sys.modules.values()):
        if ismodule(module):
            for name, value in list(vars(module).items()):
                # The type first: id() runs audit hooks, and there are half a million names.
                if type(value) in kinds and id(value) in known_as:
                    known_as[id(value)].append((module, name))
    return known_as
