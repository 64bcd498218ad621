"""Write what the parser of a Megatron release accepts into the table by which commands read flags.

    python scripts/flag_table.py

reads the Megatron that Python would import and replaces what the table has of its release; PYTHONPATH leads
to another one.  What a new argument does to a step is written by hand, into ``job/flag_effects.toml``.
"""

import json
import os
from argparse import Action, ArgumentParser, BooleanOptionalAction
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from megatron_pp_ext.integration.releases import megatron_release
from megatron_pp_ext.job import our_flags
from megatron_pp_ext.job.flag_table import FILE, Row, by_release, name_of

_TYPES = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "la_freq_type": "pattern",
    "moe_freq_type": "pattern",
}
"""The types that commands convert to, by the function of Megatron's parser; other values stay texts."""


def rows_of_megatron() -> list[Row]:
    """Return what the table should have of the Megatron that is imported here."""
    os.environ.pop("LOCAL_RANK", None)  # the default of a flag
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False, add_help=False))
    defaults = vars(parser.parse_args([]))
    ours = our_flags.names()  # they are among Megatron's where this package's hooks are installed
    actions = [action for action in parser._actions if action.dest not in ours]
    return [row for action in actions for row in _rows(action, defaults[action.dest])]


def _rows(action: Action, default: Any) -> Iterator[Row]:
    """Yield the row of a flag, or two for one with a second name that turns it off."""
    about: Row = {"dest": action.dest, "default": _plain(default)}
    if isinstance(action, BooleanOptionalAction):
        for value in (True, False):
            names = [name for name in action.option_strings if name.startswith("--no-") != value]
            yield {"flags": names, "sets": value, **about}
    elif action.nargs == 0:
        yield {"flags": action.option_strings, "sets": action.const, **about}
    else:
        values = {"type": _TYPES.get(getattr(action.type, "__name__", "")), "nargs": action.nargs}
        choices = action.choices and [_plain(choice) for choice in action.choices]
        yield {"flags": action.option_strings, **values, "choices": choices, **about}


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value


def written(releases: Mapping[str, Sequence[Row]]) -> str:
    """Return the content of ``FILE`` for the rows of ``releases``; a row is a line."""
    having: dict[str, list[str]] = {}
    for release, rows in releases.items():
        for row in rows:
            having.setdefault(json.dumps(_short(row)), []).append(release)
    lines = []
    for line, names in sorted(having.items()):
        few = {} if len(names) == len(releases) else {"releases": names}
        lines.append(json.dumps({**json.loads(line), **few}))
    head = json.dumps({"releases": [*releases]}, indent=1)
    return head.removesuffix("\n}") + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def _short(row: Row) -> Row:
    """Return ``row`` without what ``by_release`` fills in, its keys in one order."""
    derived = {"dest": name_of(row["flags"][0])}
    keys = ("flags", "dest", "sets", "type", "nargs", "choices", "default")
    return {key: row[key] for key in keys if row.get(key) not in (None, derived.get(key, ...))}


if __name__ == "__main__":
    release = ".".join(map(str, megatron_release()))
    FILE.write_text(written({**by_release(), release: rows_of_megatron()}), encoding="utf-8")
