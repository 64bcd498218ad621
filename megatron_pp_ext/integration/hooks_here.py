"""The report of ``mpp doctor`` on this machine's Megatron: whether the hooks fit, and which commit it is."""

import importlib
from importlib.metadata import PackageNotFoundError

from rich.table import Table

from megatron_pp_ext.integration import patching, places, releases, tried


def problem_of_import() -> str | None:
    """Import Megatron and its hooks; return an error in one line, or None."""
    try:
        patching.require_known_release()
        _hooks()
    except patching.HookError as error:
        return str(error)
    except (ImportError, PackageNotFoundError) as error:
        return (
            f"Megatron cannot be imported ({error}): install megatron-core[training], or correct PYTHONPATH"
        )
    return None


def for_what() -> str:
    """Return for which of the two ways to request a schedule this Megatron is, if it is not for both."""
    return "" if _takes_flags() else " for megatron_pp_ext.install, but not for flags"


def commit() -> str:
    """Name in one line the tried commits whose hooked functions this Megatron has."""
    signatures = {
        place.path: places.parameters_here(place.path) for hook in _hooks() for place in hook.places
    }
    matching = tried.agreeing(signatures)
    if not matching:
        return f"No commit with exactly its functions was tried. The nearest is {tried.nearest(signatures)}."
    version = releases.megatron_version().partition("+")[0]
    of_version = [candidate for candidate in matching if candidate.version == version] or matching
    return f"Its hooked functions are those of {', and of '.join(map(str, of_version))}, which ran the tests."


def examine(details: list[Table | str]) -> list[str]:
    """Add every hook to ``details``, and whether it fits; return a line for each that does not."""
    from megatron_pp_ext.integration import frameworks
    from megatron_pp_ext.integration.workarounds import of_core

    problems = []
    location = importlib.import_module("megatron.core").__path__[0]
    table = Table(
        title=f"Hooks into Megatron {releases.own_megatron_version()} in {location}", title_justify="left"
    )
    table.add_column("hook", overflow="fold")
    table.add_column("for")
    table.add_column("as in")
    table.add_column("fits")
    around_core = (*frameworks.HOOKS, *frameworks.ENGINE)
    always = (*_hooks(cpu=False), *around_core)
    for hook in (*_hooks(), *filter(_can_be_imported, around_core)):
        shown_place, since, fits = hook.places[0], "", "not in this release"
        try:
            place = hook.here()
            if place is not None:
                shown_place, since, fits = place, _first_with(place), "yes"
        except patching.HookError as error:
            problems.append(str(error))
            fits = "no"
        why = hook.why if hook in always else f"--cpu: {hook.why}"
        table.add_row(shown_place.dotted.removeprefix("megatron."), why, since, fits)
    workarounds = Table(
        "defect", "in", "gone when this passes without it", title="Workarounds of Megatron's own defects"
    )
    defects = [module.WORKAROUND for module in of_core.MODULES]
    if _takes_flags():
        from megatron_pp_ext.integration.workarounds.table import WORKAROUNDS

        defects = [*WORKAROUNDS]
    for defect in defects:
        workarounds.add_row(defect.defect, defect.releases, defect.test.removeprefix("tests/"))
    details += [
        table,
        workarounds,
        "Nothing else of Megatron is replaced. With --cpu, torch.cuda and NCCL are stood in for, and the "
        "queue of the checkpoint writers is made before the run.",
    ]
    return problems


def _takes_flags() -> bool:
    release = releases.release_here()
    return release is not None and release.by_flags


def _hooks(cpu: bool = True) -> tuple[patching.Hook, ...]:
    """Return the hooks for this machine, with ``cpu`` those for a machine without a GPU."""
    if not _takes_flags():
        from megatron_pp_ext.integration import core_hooks

        return core_hooks.INSTALLED
    from megatron_pp_ext.integration import hooks

    return hooks.all_hooks(cpu)


def _first_with(place: places.Place) -> str:
    """Return the oldest tried commit that has the present function at ``place``, by its parameters."""
    parameters = places.parameters_here(place.path)
    having = (
        commit for commit in tried.commits() if tried.signatures(commit.name).get(place.path) == parameters
    )
    return next((commit.name for commit in having), "")


def _can_be_imported(hook: patching.Hook) -> bool:
    """Return whether the framework of ``hook`` is here, with all that it needs."""
    try:
        importlib.import_module(hook.places[0].module)
    except ImportError:
        return False
    return True
