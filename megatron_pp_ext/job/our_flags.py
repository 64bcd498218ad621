"""The flags that this package adds to Megatron's, from ``our_flags.toml`` and from tables of features.

``job.pipeline`` gives them their meaning.
"""

import tomllib
from argparse import ArgumentParser, ArgumentTypeError
from functools import cache
from pathlib import Path
from typing import Any

from megatron_pp_ext import amounts
from megatron_pp_ext.compiler.limits import LARGEST_FRACTION
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.names import AUTO, OTHERS


def _bytes(given: str) -> float:
    """Return the bytes of a flag's value, whose errors argparse puts after the flag."""
    try:
        return amounts.read(given, "the value")
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _count_or_auto(given: str) -> int | str:
    """Return the number that a flag's value is, or ``auto``."""
    if given == AUTO:
        return given
    try:
        return int(given)
    except ValueError:
        raise ArgumentTypeError(f"the value is {given!r}, but must be a whole number or {AUTO}") from None


_OURS = {"with_stock", "text_or_number"}
"""The keys of a row that argparse does not know."""

_TYPES = {
    "schedule": catalog.canonical,
    "file": Path,
    "int": int,
    "float": float,
    "bytes": _bytes,
    "count_or_auto": _count_or_auto,
}


@cache
def _table() -> dict[str, dict[str, Any]]:
    files = (Path(__file__).with_name("our_flags.toml"), *(feature.flags for feature in FEATURES))
    tables = (tomllib.loads(file.read_text(encoding="utf-8")) for file in files if file is not None)
    return {flag: row for table in tables for flag, row in table.items()}


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add this package's flags to ``parser``, and return it."""
    group = parser.add_argument_group(title="pipeline schedules (megatron_pp_ext)")
    others = ", ".join(f"{other.name} ({other.summary})" for other in OTHERS)
    known = {"schedules": ", ".join(catalog.NAMES), "others": others, "most": f"{LARGEST_FRACTION:g}"}
    for flag, row in _table().items():
        about = {key: value for key, value in row.items() if key not in _OURS}
        about["help"] = row["help"].format_map(known)
        if "type" in row:
            about["type"] = _TYPES[row["type"]]
        group.add_argument(flag, **about)
    return parser


def flags() -> list[str]:
    """Return this package's flags."""
    return list(_table())


def names() -> list[str]:
    """Return the names of the arguments that this package's flags set."""
    return [flag.removeprefix("--").replace("-", "_") for flag in flags()]


@cache
def texts_or_numbers() -> dict[str, str]:
    """Return what the values must be of arguments that are a text or a number, by their names."""
    rows = zip(names(), _table().values(), strict=True)
    return {name: row["text_or_number"] for name, row in rows if "text_or_number" in row}


def of_schedules() -> dict[str, int]:
    """Return the flags that only a schedule needs, each with the number of words after it."""
    return {flag: int("action" not in row) for flag, row in _table().items() if "with_stock" not in row}
