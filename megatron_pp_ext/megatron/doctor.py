"""Examine what this machine has and lacks for running the schedules, and whether they fit its Megatron."""

import importlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_pp_ext import startup_file
from megatron_pp_ext.job.requested_job import FIRST_ENGINE
from megatron_pp_ext.megatron import patching, releases
from megatron_pp_ext.megatron.source_files import SourceFiles, parameters_in
from megatron_pp_ext.runtime.groups import is_nccl2, loaded_nccl, message_backend

TRIED: Mapping[str, tuple[str, ...]] = {
    "megatron-bridge": ("0.6.2",),
    "mcore-bridge": ("1.6.5",),
    "ms-swift": ("4.6.0",),
    "verl": ("0.9.1",),
    "nemo-rl": (),
    "slime": (),
}
"""The versions of each distribution under whose loop a test trained; none where its source was only read."""


def here() -> Iterator[tuple[str, str, str]]:
    """Yield name, version and whether that was tried, of every trainer of this environment."""
    for name, tried in TRIED.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if installed in tried:
            yield name, installed, "yes"
        else:
            yield name, installed, f"no, but {', '.join(tried)} was" if tried else "no, its source was read"


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
        place.path: patching.parameters_here(place.path) for hook in _hooks() for place in hook.places
    }
    matching = patching.agreeing(signatures)
    if not matching:
        return (
            f"No commit with exactly its functions was tried. The nearest is {patching.closest(signatures)}."
        )
    version = releases.megatron_version().partition("+")[0]
    of_version = [candidate for candidate in matching if candidate.version == version] or matching
    return f"Its hooked functions are those of {', and of '.join(map(str, of_version))}, which ran the tests."


def examine_hooks(details: list[Table | str]) -> list[str]:
    """Add every hook to ``details``, and whether it fits; return a line for each that does not."""
    from megatron_pp_ext.megatron import frameworks
    from megatron_pp_ext.megatron.workarounds import BUCKET_PADDING

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
    for hook, parameters_of in _hooks_of_logs():
        try:
            place = hook.in_megatron(parameters_of, releases.megatron_release()) or hook.places[0]
            since, fits = _first_with(place, parameters_of), "yes"
        except patching.HookError:
            place, since, fits = hook.places[0], "", "no: the log is without them"
        table.add_row(place.dotted.removeprefix("megatron."), hook.why, since, fits)
    workarounds = Table(
        "defect", "in", "gone when this passes without it", title="Workarounds of Megatron's own defects"
    )
    defects = [BUCKET_PADDING]
    if _takes_flags():
        from megatron_pp_ext.megatron.workarounds import WORKAROUNDS

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
        from megatron_pp_ext.megatron import core_hooks

        return core_hooks.INSTALLED
    from megatron_pp_ext.megatron import hooks

    return hooks.all_hooks(cpu)


def _hooks_of_logs() -> Iterator[tuple[patching.Hook, patching.ParametersOf]]:
    """Yield the hooks into the logs of the trainers that are here, and what reads the parameters there.

    Trainers are not imported: some change Megatron, and some need a GPU.
    """
    from megatron_pp_ext.megatron import frameworks

    for hook in frameworks.LOGS:
        top, part = hook.places[0].module.split(".")[:2]
        spec = importlib.util.find_spec(top)
        for folder in (spec and spec.submodule_search_locations) or ():
            if Path(folder, part).is_dir():
                yield hook, partial(parameters_in, SourceFiles(Path(folder).parent))


def _first_with(
    place: patching.Place, parameters_of: patching.ParametersOf = patching.parameters_here
) -> str:
    """Return the oldest tried commit that has the present function at ``place``, by its parameters."""
    parameters = parameters_of(place.path)
    having = (
        commit
        for commit in patching.commits()
        if patching.signatures(commit.name).get(place.path) == parameters
    )
    return next((commit.name for commit in having), "")


def _can_be_imported(hook: patching.Hook) -> bool:
    """Return whether the framework of ``hook`` is here, with all that it needs."""
    try:
        importlib.import_module(hook.places[0].module)
    except ImportError:
        return False
    return True


HANGS = (
    "Hangs: every schedule is proved free of them (the catalogue's, compiled ones, checked csv files), "
    "whatever the number of hardware queues; not covered is a model whose ranks launch collectives in "
    "different orders. Over NCCL, 2 and 4 ranks on one H100 have run every schedule of the catalogue."
)
"""The proof (``schedule.messages``) assumes nothing about the backend, so it holds on every machine."""

_APEX_KERNELS = "fused_weight_gradient_mlp_cuda"

PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex")


Waiting = Callable[[str], AbstractContextManager[object]]
"""Shows the present work while a context lasts."""


def import_plugins(names: Iterable[str]) -> None:
    """Import the modules ``names``; ValueError, in one line, for one that is not there."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(f"--plugin {name} cannot be imported ({error}); correct PYTHONPATH") from error


def changed_by_others() -> Table:
    """Return a table of what other packages have changed of the hooked functions."""
    from megatron_pp_ext.megatron import frameworks, other_patches

    rows = other_patches.others((*_hooks(), *frameworks.HOOKS, *frameworks.ENGINE))
    return _table(
        "Changed by other packages", ("hooked function", "function of another package", "this"), rows
    )


def examine(
    console: Console,
    checkout: Path | None,
    waiting: Waiting,
    in_full: bool = False,
    plugins: Iterable[str] = (),
) -> int:
    """Print a verdict and all that is missing; return 0 if all hooks fit.

    Where it is wanted ``in_full``, versions, how messages go and every hook follow.  ``checkout`` is a
    Megatron-LM checkout to look at in place of the installed megatron-core, and ``plugins`` are modules that
    change Megatron when they are imported.  Raises ValueError if one of them cannot be imported, if
    ``checkout`` is not one, or if another Megatron is imported already.
    """
    if checkout is not None:
        _put_first(checkout)
    missing = _table("Missing", ("this machine lacks", "so"), lacking())
    followed = (
        "is followed (mpp activate)" if startup_file.is_active() else "has no effect before mpp activate"
    )
    details: list[Table | str] = [
        _table("Versions", ("part", "found"), _versions()),
        _table("Messages between ranks", ("part", "here"), messages()),
        HANGS,
        _table("Trainers for install()", ("framework", "here", "tried"), here()),
        f"{startup_file.SCHEDULE} {followed} in this environment.",
    ]

    # The stand-ins let Megatron be imported on a machine without a GPU.  The devices are known by now.
    advice = how_to_start()
    if not torch.cuda.is_available():
        from megatron_pp_ext import cpu

        cpu.install()
    with waiting("importing Megatron"):
        problem = problem_of_import()
    lines: list[str] = []
    changes: list[Table | str] = []
    if problem is None:
        import_plugins(plugins)
        lines = examine_hooks(details)
        changes.append(changed_by_others())
        if lines:
            fix = "install a Megatron of docs/compatibility.md, or run without megatron_pp_ext"
            problem = f"{len(lines)} hook(s) do not fit this Megatron: {fix}"
        lines.append(commit())
    verdict = f"not ready: {problem}"
    if problem is None:
        verdict = f"ready{for_what()}: Megatron {releases.own_megatron_version()} fits; {advice}"
    report: list[Table | str] = [verdict, *lines, *changes, missing]
    for entry in (
        (*report, *details) if in_full else (*report, "mpp doctor --full lists all that was looked at.")
    ):
        if isinstance(entry, str):
            console.print(entry, soft_wrap=True, markup=False)
        elif entry.row_count:
            console.print(entry)
    return 0 if problem is None else 1


def how_to_start() -> str:
    """Return the flags and the launcher that a training run on this machine needs, in words."""
    if not torch.cuda.is_available():
        return "there is no GPU, so start scripts with --cpu"
    flags = []
    engine = _version("transformer-engine")
    if engine is None or _numbers(engine) < _numbers(FIRST_ENGINE):
        flags.append("--transformer-impl local")
    if importlib.util.find_spec(_APEX_KERNELS) is None and flags:
        flags.append("--no-gradient-accumulation-fusion")
    return f"start scripts with {' '.join(flags)}" if flags else "scripts start as they are"


def lacking() -> Iterator[tuple[str, str]]:
    """Yield missing parts of this machine, each with the consequence."""
    if not torch.cuda.is_available():
        yield "a GPU that torch can use", "start scripts with --cpu: slow, for trying things out"
    engine = _version("transformer-engine")
    if engine is None:
        yield "transformer-engine", "Megatron's default layers: give --transformer-impl local (--cpu does)"
    elif _numbers(engine) < _numbers(FIRST_ENGINE):
        yield (
            f"transformer-engine {FIRST_ENGINE} or newer",
            f"{engine} cannot split its backward: give --transformer-impl local, or update it",
        )
    if importlib.util.find_spec(_APEX_KERNELS) is None:
        why = "local layers need --no-gradient-accumulation-fusion (--cpu gives it)"
        if _version("apex") and importlib.util.find_spec("apex.optimizers") is None:
            why += "; the apex installed here is another project's, build NVIDIA's from source"
        yield "NVIDIA apex", why
    if importlib.util.find_spec("pybind11") is None:
        yield ("pybind11", "a checkout's script needs it for its dataset helpers: pip install pybind11")
    if shutil.which("nvcc") is None:
        yield "nvcc", "building Transformer Engine or apex from source needs it; this package does not"


def messages() -> Iterator[tuple[str, str]]:
    """Yield the transport of messages between ranks, and the settings of its kernels on a GPU."""
    is_there = dist.is_nccl_available()
    yield "NCCL", _nccl_version() if is_there else "not in this torch"
    if is_there:
        yield '"nccl" stands for', _behind_nccl()
        yield "nccl-lazy", "available" if dist.is_backend_available("nccl-lazy") else "not in this torch"
    backend = message_backend("nccl" if is_there else "gloo")
    yield "pipeline messages", f"{backend.name}: {backend.note}"
    # The defaults are ROCm's and CUDA's.
    name, default = ("GPU_MAX_HW_QUEUES", 4) if torch.version.hip else ("CUDA_DEVICE_MAX_CONNECTIONS", 8)
    yield "hardware queues", _setting(name, str(default))
    if not torch.version.hip:
        yield "modules are loaded", _setting("CUDA_MODULE_LOADING", "LAZY")


def _nccl_version() -> str:
    try:
        built = ".".join(map(str, torch.cuda.nccl.version()))
    except AttributeError:
        built = "torch does not report its version"
    loaded = loaded_nccl()
    if loaded is None or built.startswith(runs := ".".join(map(str, loaded))):
        return built
    return f"{runs}; torch was built with {built}"


def _behind_nccl() -> str:
    if is_nccl2("nccl"):
        return "nccl2; TORCH_DIST_USE_NCCL2=0 takes nccl-legacy"
    if dist.is_backend_available("nccl2"):
        return "nccl-legacy, since TORCH_DIST_USE_NCCL2=0"
    return "the only NCCL backend of this torch"


def _setting(name: str, default: str) -> str:
    value = os.environ.get(name)
    return f"{default} ({name} is not set)" if value is None else f"{value} ({name})"


def _put_first(checkout: Path) -> None:
    if not (checkout / "megatron" / "core").is_dir():
        raise ValueError(f"{checkout} has no megatron/core; give the folder of a Megatron-LM checkout")
    if "megatron.core" in sys.modules:
        raise ValueError(f"--megatron {checkout} comes too late: another Megatron is imported already")
    sys.path.insert(0, str(checkout.resolve()))


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for package in PACKAGES:
        yield package, _version(package) or "not installed"
    if torch.cuda.is_available():
        yield "devices", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    else:
        yield "devices", f"{os.cpu_count()} CPU cores"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("+")[0].split(".")[:2] if number.isdigit())
