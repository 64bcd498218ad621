"""Errors in the words of ``megatron_pp_ext.install``: arguments and a config where a job has flags."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from megatron_pp_ext.job import flag_table, model_config, options, our_flags

_ARGUMENTS = "memory-limit", "costs", "trace", "loss-rank", "unproved"
_SWITCHES = {"unproved": True}
"""Arguments whose flags have no value, and the value that those set."""

_SETTING = re.compile(r"--[a-zA-Z0-9][a-zA-Z0-9-]*")

_variables: dict[str, str] = {}
"""The environment's variable of each argument, where the environment made the call."""


def use_variables(variables: Mapping[str, str]) -> None:
    """Let errors name the environment's ``variables``, by argument, from now on; with none the arguments."""
    _variables.clear()
    _variables.update(variables)


def by_call(line: str) -> str:
    """Return ``line`` with arguments of a call and settings of a config for the flags that mean the same."""
    line = _SETTING.sub(_setting, _flags().sub(_argument, line))
    return _values().sub(_variable, line) if _variables else line


@contextmanager
def in_words_of_call() -> Iterator[None]:
    """Let errors that leave the context state what a call can change."""
    try:
        yield
    except (Exception, SystemExit) as error:
        error.args = tuple(by_call(part) if isinstance(part, str) else part for part in error.args)
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            error.code = by_call(error.code)  # which is what Python prints
        raise


@cache
def _flags() -> re.Pattern[str]:
    """Return what matches the flags that are arguments of a call, with a value that is a word."""
    of_features = (name.replace("_", "-") for name in options.arguments())
    names, words = "|".join((*_ARGUMENTS, *of_features)), "shared|auto|first|last|rule|search|given|off"
    return re.compile(rf"--pipeline-({names})(?![\w-])(?: ({words})\b)?")


def _argument(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    if (value := _SWITCHES.get(name, flag[2])) is None:
        return _variables.get(name, name)
    return f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"


def _setting(flag: re.Match[str]) -> str:
    """Return the config's name of what one of Megatron's flags sets; flags of this package stay."""
    action = flag_table.parser()._option_string_actions.get(flag[0])
    if action is None or flag[0] in our_flags.flags():
        return flag[0]
    name = model_config.setting_of(action.dest)
    return f"{name}=False" if action.const is False else name


def _values() -> re.Pattern[str]:
    """Return what matches arguments that have a variable, with the value after them if it has one.

    Names without an underscore are words of the language, too: they are arguments before a value alone.
    """
    plain = "|".join(name for name in _variables if "_" not in name)
    joined = "|".join(name for name in _variables if "_" in name)
    return re.compile(rf"""\b(?:({joined})\b|({plain})(?==| is ))(?:="?([^\s,;"]+)"?)?""")


def _variable(argument: re.Match[str]) -> str:
    name, value = _variables[argument[1] or argument[2]], argument[3]
    return name if value is None else f"{name}={ {'True': 1, 'False': 0}.get(value, value) }"
