"""A schedule for programs that know nothing of this package, asked for by the environment.

``mpp activate`` puts a file into site-packages (``startup_file``) whose one line Python runs at every start.
Where a variable of ``VARIABLES`` is set, or one that resembles them, ``megatron_pp_ext.install`` is called
by the variables, right after ``megatron.core`` is imported and so before any of its functions can
be imported from it by name.

This module imports nothing but the standard library until then, because it may run at every start of Python.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_pp_ext.json_input import did_you_mean
from megatron_pp_ext.launch_errors import in_one_line
from megatron_pp_ext.startup_file import CACHE, PREFIX, SCHEDULE


def _limit(text: str) -> float | str:
    """Return a limit as the number that it is, or as the text of one for each rank, such as 0.9-0.8."""
    try:
        return float(text)
    except ValueError:
        return text


def _tokens(text: str) -> int | str:
    """Return a number of tokens as the number that it is, or another word, such as auto, as it is."""
    return int(text) if text.isdecimal() else text


def _switch(text: str) -> bool:
    """Return whether a variable is 1 and not 0; ValueError for another text."""
    if text not in ("0", "1"):
        raise ValueError(f"neither 0 nor 1: {text}")
    return text == "1"


VARIABLES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    SCHEDULE: ("schedule", str),
    "MEGATRON_PP_RANKS": ("ranks", int),
    "MEGATRON_PP_MICROBATCHES": ("microbatches", int),
    "MEGATRON_PP_CHUNKS": ("chunks", int),
    "MEGATRON_PP_MEMORY_LIMIT": ("memory_limit", _limit),
    "MEGATRON_PP_COSTS": ("costs", Path),
    "MEGATRON_PP_VOCABULARY": ("vocabulary", str),
    "MEGATRON_PP_OFFLOAD": ("offload", str),
    "MEGATRON_PP_SLICE_TOKENS": ("slice_tokens", _tokens),
    "MEGATRON_PP_SLICE_CHECK": ("slice_check", str),
    "MEGATRON_PP_LOSS_RANK": ("loss_rank", str),
    "MEGATRON_PP_ORDER": ("order", str),
    "MEGATRON_PP_TRACE": ("trace", Path),
    "MEGATRON_PP_TIMEOUT": ("timeout", float),
    "MEGATRON_PP_UNPROVED": ("unproved", _switch),
    "MEGATRON_PP_LOG": ("log", _switch),
}
"""The argument of ``megatron_pp_ext.install`` that each variable gives, and what reads it."""

_NEEDED = {
    SCHEDULE: "a schedule of mpp list",
    "MEGATRON_PP_RANKS": "the pipeline's number of ranks",
    "MEGATRON_PP_MICROBATCHES": "the number of microbatches of a training step",
}
"""The variables that have to be set, and their meaning."""


def arguments(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of ``megatron_pp_ext.install`` that ``environment`` gives.

    ValueError for a variable that is unknown, is missing or is not a number where it must.
    """
    variables = _ours(environment)
    for name in variables:
        if name not in VARIABLES:
            hint = did_you_mean(name, VARIABLES, f"the variables are {', '.join(VARIABLES)}")
            raise ValueError(f"{name} is unknown; unset it, or correct its name: {hint}")
    for name, meaning in _NEEDED.items():
        if not variables.get(name):
            variable = next((f"{other}={value}" for other, value in variables.items() if value), "install")
            raise ValueError(f"{variable} needs {name}; set it to {meaning}")
    read = {}
    for name, value in variables.items():
        argument, reader = VARIABLES[name]
        try:
            read[argument] = reader(value)
        except ValueError:
            kind, fix = ("neither 1 nor 0", "1 or 0") if reader is _switch else ("no number", "one")
            raise ValueError(f"{name}={value} is {kind}; set it to {fix}, or unset it") from None
    return read


def _ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are about a schedule, or are meant to be."""
    return {name: value for name, value in environment.items() if name.startswith(PREFIX) and name != CACHE}


def refuse_with_flags() -> None:
    """Raise ValueError where both the environment and ``--pipeline-schedule`` ask for a schedule."""
    for name, value in _ours(os.environ).items():
        raise ValueError(
            f"{name}={value} is for programs that are started without megatron_pp_ext; unset it, and give "
            "--pipeline-schedule"
        )


def watch() -> None:
    """Install the environment's schedule as soon as ``megatron.core`` is imported in this process."""
    sys.meta_path.insert(0, _AfterCore())


class _AfterCore:
    """A finder of ``megatron.core`` alone, which finds it where others do and has the last word about it.

    It stays until an import has worked: some programs look for the package without importing it, and some
    import it again after an import that failed.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "megatron.core":
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                _install()
                sys.meta_path.remove(self)

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def _install() -> None:
    with in_one_line():
        settings = arguments(os.environ)
        from megatron_pp_ext.megatron import by_call

        variables = {argument: name for name, (argument, _) in VARIABLES.items()}
        by_call.install_by_variables(variables, **settings)
