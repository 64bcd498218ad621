"""Errors in the words of ``megatron_pp_ext.install``, whose caller has arguments where a job has flags."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from megatron_pp_ext.job import options

_ARGUMENTS = "memory-limit", "costs", "trace", "loss-rank"


def by_call(line: str) -> str:
    """Return ``line`` with the arguments of a call for the flags that mean the same."""
    return _flags().sub(_argument, line)


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
    names, words = "|".join((*_ARGUMENTS, *of_features)), "shared|auto|first|last|off"
    return re.compile(rf"--pipeline-({names})(?![\w-])(?: ({words})\b)?")


def _argument(flag: re.Match[str]) -> str:
    name, value = flag[1].replace("-", "_"), flag[2]
    return f'{name}="{value}"' if value else name
