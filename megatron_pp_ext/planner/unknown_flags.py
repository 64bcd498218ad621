"""A mistyped flag found without importing Megatron, which takes half a minute where its files are not cached.

Every flag of Megatron stands somewhere in its sources: as text, or as the field of a configuration.  A flag
that stands nowhere is none; of the others, Megatron's parser decides.
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from megatron_pp_ext.job import flag_hint
from megatron_pp_ext.planner.step.flag_words import by_name
from megatron_pp_ext.planner.step.model_description import DEFAULTS, flag

_OURS = Path(__file__).parents[1] / "integration" / "request" / "parser.py"
_PREFIXES = "no-", "disable-", "enable-"
"""What Megatron puts in front of a field's name for the flag that changes its default."""

_WORD = re.compile(r"[\w-]+")
_FLAG = re.compile(r"['\"](--[a-z][\w-]+)['\"]")


def refuse(words: Sequence[str]) -> None:
    """Raise ValueError for a flag in ``words``, a command line, that the installed Megatron cannot have."""
    missing = {name: _spellings(name) for name, _ in by_name(words) if name.startswith("--")}
    training, core = (_folder(f"megatron.{part}") for part in ("training", "core"))
    if training is None or core is None:
        return
    for file in chain([_OURS, training / "arguments.py"], training.rglob("*.py"), core.rglob("*.py")):
        present = {word.lstrip("-") for word in _WORD.findall(_text(file))}
        missing = {name: spellings for name, spellings in missing.items() if spellings.isdisjoint(present)}
        if not missing:
            return
    spelled = {name for file in (_OURS, training / "arguments.py") for name in _FLAG.findall(_text(file))}
    for name in missing:
        hint = flag_hint.hint(name, spelled | set(map(flag, DEFAULTS)), "see Megatron's --help")
        raise ValueError(f"in the model's flags: {name} is none of Megatron's: {hint}")


def _spellings(name: str) -> set[str]:
    """Return the words that the flag ``name``, or the field of a configuration behind it, is written as."""
    bare = name.removeprefix("--")
    spellings = {bare, *(bare.removeprefix(prefix) for prefix in _PREFIXES)}
    return spellings | {spelled.replace("-", "_") for spelled in spellings}


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _folder(module: str) -> Path | None:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return None
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None
