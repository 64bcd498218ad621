"""Replaces names in Megatron, all of them or none, and puts them back; the places, as they were tried.

``signatures.json``, which ``scripts/tried_commits.py`` writes, has the parameters of each place in each tried
commit.
"""

import importlib
import inspect
import json
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import ismodule
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from megatron_pp_ext.around import around
from megatron_pp_ext.megatron import releases

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


FILE = Path(__file__).with_name("signatures.json")


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit that was tried.  As text it names the repository and the commit.

    The commits are listed by name in ``signatures.json``, with the repository, the date, the version in the
    source, and whose pin a commit is: Megatron's development goes on under one version number, so a place is
    judged by its function.
    """

    name: str
    repository: str
    commit: str
    date: str
    version: str
    pinned_by: str
    """The frameworks that pin the commit in images or submodules; empty where it is a release."""
    patch: str = ""
    """Its user's changes to it, in words."""

    @property
    def is_megatron(self) -> bool:
        """Whether it is one of Megatron's, and not one of a framework that is hooked."""
        return self.repository.endswith("/Megatron-LM")

    def __str__(self) -> str:
        origin = f"{self.repository} {self.commit}".strip()
        patch = f" with {self.patch}" if self.patch else ""
        return f"{self.name} ({origin}{patch}, {self.date})"


@cache
def _read() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return read


@cache
def commits() -> tuple[Commit, ...]:
    """Return every commit of the table, the oldest first, those of frameworks too."""
    rows = [Commit(name=name, **row) for name, row in _read()["commits"].items()]
    return tuple(sorted(rows, key=lambda row: row.date))


@cache
def signatures(name: str) -> Mapping[str, str]:
    """Return the parameters by place of the commit that is called ``name``.

    In the file, each of the ``places`` has the parameters of a function, as text, and its ``commits``, where
    those are not all of Megatron's.  A commit without a row for a place lacks it.
    """
    all_names = [commit.name for commit in commits() if commit.is_megatron]
    rows = _read()["places"]
    return {row["place"]: row["parameters"] for row in rows if name in row.get("commits", all_names)}


def agreeing(parameters: Mapping[str, str | None]) -> list[Commit]:
    """Return Megatron's commits that have ``parameters`` (by place), of those that the table lists."""
    return [commit for commit in commits() if commit.is_megatron and _differing(commit, parameters) == 0]


def closest(parameters: Mapping[str, str | None]) -> Commit:
    """Return Megatron's commit that differs from ``parameters`` in the fewest places, the newest."""
    newest_first = [commit for commit in reversed(commits()) if commit.is_megatron]
    return min(newest_first, key=lambda commit: _differing(commit, parameters))


def _differing(commit: Commit, found_parameters: Mapping[str, str | None]) -> int:
    accepted, places = signatures(commit.name), {row["place"] for row in _read()["places"]}
    return sum(
        accepted.get(place) != parameters for place, parameters in found_parameters.items() if place in places
    )


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
        return choose(self.places, parameters_of, self.since, release)

    def here(self) -> Place | None:
        """Return the place that is replaced in the Megatron that is imported here; see ``in_megatron``."""
        return self.in_megatron(parameters_here, releases.megatron_release())


@dataclass(frozen=True, slots=True)
class HookFunction:
    """A decorated function, and the ``hooks`` that put it in Megatron's places."""

    wrap: Callable[[Any], Any]
    hooks: tuple[Hook, ...]
    ordered: int | None
    """As in ``Place``."""

    def __call__(self, stock: Any) -> Any:
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
        hook = Hook(places(place, parameters, before, wrapped.ordered), wrapped.wrap, why, since)
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

    All hooks are checked before the first is touched: a Megatron that has moved one of them is refused whole
    and stays stock.  A name is replaced in every module that has imported it, whichever package that is of.
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
                replacing.append((hook, place, target_of(place)))
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


_awaited: tuple[Hook, ...] = ()
_optional: tuple[Hook, ...] = ()
"""The hooks in packages that this process may import later, and those that need not fit."""


def apply_when_imported(hooks: Iterable[Hook], optional: Iterable[Hook]) -> None:
    """Let ``apply_imported`` replace ``hooks``, and those of the ``optional`` that fit."""
    global _awaited, _optional
    _awaited, _optional = tuple(hooks), tuple(optional)


def apply_imported() -> None:
    """Replace the awaited hooks whose packages are imported by now; HookError where one does not fit."""
    apply([*filter(_is_imported, _awaited), *filter(_fits, filter(_is_imported, _optional))])


def _is_imported(hook: Hook) -> bool:
    return hook.places[0].module in sys.modules


def _fits(hook: Hook) -> bool:
    try:
        return hook.here() is not None
    except HookError:
        return False


def advice(hooks: Iterable[Hook]) -> str:
    """Return advice for where one of ``hooks`` does not fit, and the tried commit that comes nearest."""
    paths = [place.path for hook in hooks for place in hook.places]
    nearest = closest({path: parameters_here(path) for path in paths})
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


def places_replaced() -> set[str]:
    """Return the places whose names are replaced at this moment."""
    return {path for path, *_ in _applied}


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
