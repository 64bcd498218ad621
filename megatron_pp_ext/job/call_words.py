"""The door of ``megatron_pp_ext.install``: errors name its arguments and a config where a job has flags."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from megatron_pp_ext.job import flag_table, model_config, options, our_flags
from megatron_pp_ext.schedule.names import AUTO
from megatron_pp_ext.setting_error import NamesSettings

_ARGUMENTS = "ranks", "microbatches", "chunks", "memory-limit", "costs", "trace", "timeout", "loss-rank"
_SWITCH = "unproved"
"""The argument whose flag has no value."""

_variables: dict[str, str] = {}
"""The environment's variable of each argument, where the environment made the call."""


def use_variables(variables: Mapping[str, str]) -> None:
    """Let errors name the environment's ``variables``, by argument, from now on; with none the arguments."""
    _variables.clear()
    _variables.update(variables)


@contextmanager
def in_words_of_call() -> Iterator[None]:
    """Let errors about settings that leave the context name what a call can change."""
    try:
        yield
    except NamesSettings as error:
        error.args = tuple(by_call(part) if isinstance(part, str) else part for part in error.args)
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            error.code = by_call(error.code)  # which is what Python prints
        raise


def by_call(text: str) -> str:
    """Return the ``text`` of a ``NamesSettings`` with arguments of a call, and settings of a config."""
    text = text.replace("--pipeline-schedule ", "")
    return _FLAG.sub(_setting, _arguments().sub(_argument, text))


@cache
def _arguments() -> re.Pattern[str]:
    """Return what matches the flags of arguments, with a value after "=" or a word that some flag takes."""
    names = "|".join((*_ARGUMENTS, _SWITCH, *(name.replace("_", "-") for name in options.arguments())))
    flags = map(flag_table.parser()._option_string_actions.get, our_flags.flags())
    words = sorted({str(word) for flag in flags if flag is not None for word in flag.choices or ()} | {AUTO})
    return re.compile(rf"--pipeline-({names})(?![\w-])(?:=([^\s,;]+)| ({'|'.join(words)})\b)?")


def _argument(flag: re.Match[str]) -> str:
    name, value, word = flag[1].replace("-", "_"), flag[2], flag[3]
    if name == _SWITCH:
        value = "True"
    variable = _variables.get(name)
    if value is None and word is None:
        return variable or name
    if variable is not None:
        return f"{variable}={'1' if value == 'True' else value or word}"
    return f"{name}={value}" if word is None else f'{name}="{word}"'


_FLAG = re.compile(r"--[a-zA-Z0-9][a-zA-Z0-9-]*")


def _setting(flag: re.Match[str]) -> str:
    """Return the config's name of what one of Megatron's flags sets; flags of this package stay."""
    action = flag_table.parser()._option_string_actions.get(flag[0])
    if action is None or flag[0] in our_flags.flags():
        return flag[0]
    name = model_config.setting_of(action.dest)
    return f"{name}=False" if action.const is False else name
