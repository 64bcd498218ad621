"""Command lines of Megatron's flags as words: taken apart, written, and put over one another."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any

from megatron_pp_ext.job import flag_table

_EXCLUSIVE = {"bf16": "fp16", "fp16": "bf16", "hybrid_layer_pattern": "num_layers"}
"""Arguments that take the place of another."""


def by_name(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag of a command line with the words after it; a word without a flag goes by itself."""
    remaining = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while remaining:
        values = list(takewhile(lambda word: not word.startswith("--"), remaining[1:]))
        yield remaining[0], values
        remaining = remaining[1 + len(values) :]


def by_argument(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the words after the last flag of each argument that ``words``, a command line, set."""
    options = flag_table.parser()._option_string_actions
    return {options[name].dest: values for name, values in by_name(words) if name in options}


def spelled(values: Mapping[str, Any]) -> list[str]:
    """Return arguments as words of a command line; None, and a default that no flag sets, is left out."""
    words = []
    for name, value in values.items():
        flag = None if value is None else flag_table.flag_of(name, value)
        if flag is not None:
            words += [flag, *_values(flag, value)]
    return words


def _values(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return []
    if not isinstance(value, list | tuple):
        return [str(value)]
    if flag_table.parser()._option_string_actions[flag].type is not flag_table.pattern:
        return [str(member) for member in value]
    # Megatron reads a pattern of layers as one word, such as [0]*3+[1]*58.
    return ["+".join(f"[{mark}]*{len(list(alike))}" for mark, alike in groupby(value))]


def overridden(values: Mapping[str, Any], by: Sequence[str]) -> dict[str, Any]:
    """Return ``values`` without the arguments that ``by``, a command line, sets or rules out."""
    arguments = by_argument(by)
    ruled_out = {_EXCLUSIVE.get(name) for name in arguments}
    return {name: value for name, value in values.items() if name not in arguments and name not in ruled_out}
