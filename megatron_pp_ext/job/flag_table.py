"""The flags of Megatron and of this package, as words of a command line, and parsed without Megatron.

``job.pipeline`` gives them their meaning.
"""

import ast
import json
import re
import tomllib
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, NoReturn

from megatron_pp_ext.compiler.limits import LARGEST_FRACTION
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.json_input import did_you_mean
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.entry import AUTO, OTHERS


def _bytes(text: str) -> float:
    """Return the bytes of a flag's value, whose errors argparse puts after the flag."""
    from megatron_pp_ext import amounts

    try:
        return amounts.read(text, "the value")
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _count_or_auto(text: str) -> int | str:
    """Return the number that a flag's value is, or ``auto``."""
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"the value is {text!r}, but must be a whole number or {AUTO}") from None


_OURS = {"with_stock", "text_or_number"}
"""The keys of a row that argparse does not know."""

_OUR_TYPES = {
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
    choices = ", ".join(f"{other.name} ({other.summary})" for other in OTHERS)
    values = {"schedules": ", ".join(catalog.NAMES), "others": choices, "most": f"{LARGEST_FRACTION:g}"}
    for flag, row in _table().items():
        about = {key: value for key, value in row.items() if key not in _OURS}
        about["help"] = row["help"].format_map(values)
        if "type" in row:
            about["type"] = _OUR_TYPES[row["type"]]
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
    """Return the allowed values of arguments that are a text or a number, by their names."""
    rows = zip(names(), _table().values(), strict=True)
    return {name: row["text_or_number"] for name, row in rows if "text_or_number" in row}


def of_schedules() -> dict[str, int]:
    """Return the flags that only a schedule needs, each with the number of words after it."""
    return {flag: int("action" not in row) for flag, row in _table().items() if "with_stock" not in row}


FILE = Path(__file__).with_name("megatron_flags.json")
EFFECTS = Path(__file__).with_name("flag_effects.toml")

Row = dict[str, Any]

_GONE = {"--use-legacy-models": "this Megatron has no other models than those of its core: leave it out"}
"""Flags of older releases that have no successor."""


MOST_LAYERS = 2**14
"""The most layers of a model: what makes one for each would otherwise end with the memory, or never."""


_COUNTED_ONE_BY_ONE = (
    "num_layers",
    "hybrid_layer_pattern",
    "mtp_num_layers",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
)
"""The arguments of which commands go through layers or ranks one by one."""


class UnknownFlag(ValueError):
    """A word that is none of Megatron's flags; ``flag`` is what it begins with."""

    def __init__(self, word: str) -> None:
        super().__init__(f"in the model's flags: {_about_unknown(word)}")
        self.flag = word.partition("=")[0]


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise the error in one line, where argparse would end the process."""
        raise ValueError(f"in the model's flags: {message}: correct it")


def parse(words: Sequence[str], start: Mapping[str, Any]) -> tuple[Namespace, list[str]]:
    """Return ``start`` with what ``words``, a command line, set, and the words that are left.

    All other arguments get their defaults.  What is left are flags without effect on a step, and what is
    unknown here, with the words after them.  ValueError for values that Megatron does not accept.
    """
    args, rest = parser().parse_known_args(list(words), Namespace(**start))
    for name in _COUNTED_ONE_BY_ONE:
        value = getattr(args, name)
        if isinstance(value, int | str) and (value if isinstance(value, int) else len(value)) > MOST_LAYERS:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"in the model's flags: {flag} has more than {MOST_LAYERS:,}, the most layers of a model: "
                "correct it"
            )
    return args, rest


def unknown(words: Sequence[str]) -> list[str]:
    """Return the flags among ``words`` that have no row, and are not listed as without effect.

    ``words`` are those that ``parse`` has left; ``UnknownFlag`` for one that follows no flag.
    """
    if words and not words[0].startswith("--"):
        raise UnknownFlag(words[0])
    flags = (word.partition("=")[0] for word in words if word.startswith("--"))
    return [flag for flag in flags if flag not in known_flags()]


def _about_unknown(word: str) -> str:
    if not word.startswith("--"):
        return f"{word} follows no flag that takes it: leave it out"
    flag = word.partition("=")[0]
    otherwise = "leave it out if it is a training script's own, or see Megatron's --help"
    return f"{flag} is none of Megatron's: {hint(flag, known_flags(), otherwise)}"


def hint(flag: str, flags: Iterable[str], otherwise: str) -> str:
    """Return the question whether one of ``flags`` was meant, or ``otherwise`` if none resembles ``flag``.

    A word of the flag may be mistyped, missing or too many.  A flag with another word in its place is another
    flag, however few letters differ: ``--delay-param-gather`` does not mean ``--overlap-param-gather``.
    """
    if flag in _GONE:
        return _GONE[flag]
    return did_you_mean(flag, [name for name in flags if _has_same_words(flag, name)], otherwise, cutoff=0.7)


def _has_same_words(flag: str, other: str) -> bool:
    words, theirs = flag.split("-"), other.split("-")
    removed = [word for word in words if word not in theirs]
    right = [word for word in theirs if word not in words]
    return not right or all(get_close_matches(word, right, n=1) for word in removed)


@cache
def parser() -> ArgumentParser:
    """Return a parser of the installed Megatron's flags and this package's."""
    result = _Parser(allow_abbrev=False, add_help=False)
    for row in rows():
        about = {key: value for key, value in row.items() if key not in ("flags", "sets", "type")}
        if "sets" in row:
            result.add_argument(*row["flags"], action="store_const", const=row["sets"], **about)
        else:
            result.add_argument(*row["flags"], type=_TYPES[row.get("type")], **about)
    add_flags(result)
    return result


@cache
def _flags() -> dict[tuple[str, object], str]:
    """Return the first flag of each argument, by the value that it sets, or ... where one follows it."""
    having: dict[tuple[str, object], str] = {}
    for action in parser()._actions:
        having.setdefault((action.dest, action.const if action.nargs == 0 else ...), action.option_strings[0])
    return having


def flag_of(name: str, value: object) -> str | None:
    """Return the flag that gives the argument ``name`` this ``value``; None where no flag does."""
    return _flags().get((name, value if isinstance(value, bool) else ...))


def pattern(text: str) -> int | list[int]:
    """Return a number, or the list that an expression such as ``([0]*1+[1]*3)*2`` makes.

    ValueError for other operations than those of the example, and ArgumentTypeError, whose words argparse
    shows, for more numbers than there are layers in any model.
    """
    if "[" not in text:
        return int(text)
    if re.search(r"[^,\d\[\]()+*]", text):
        raise ValueError(f"{text} has more than brackets, numbers, commas, + and *")
    try:
        symbols = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:  # The parser has no memory for deep nesting.
        raise ValueError(f"{text} is no list") from error
    if isinstance(symbols, int):
        raise ValueError(f"{text} is no list")
    return symbols


def _evaluated(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(int(number)):
            return number
        case ast.List(nodes):
            values = [_evaluated(value) for value in nodes]
            numbers = [value for value in values if isinstance(value, int)]
            if len(numbers) == len(values):
                return numbers
        case ast.BinOp(left, ast.Add() | ast.Mult() as operation, right):
            first, second = _evaluated(left), _evaluated(right)
            if isinstance(first, int):
                first, second = second, first
            match operation, first, second:
                case ast.Add(), list(), list():
                    _require_few(len(first) + len(second))
                    return first + second
                case ast.Mult(), list(), int():
                    _require_few(len(first) * second)
                    return first * second
    raise ValueError("an operation that makes no list of numbers")


def _require_few(numbers: int) -> None:
    if numbers > MOST_LAYERS:
        raise ArgumentTypeError(f"it makes more than {MOST_LAYERS:,} numbers, the most layers of a model")


_TYPES: dict[str | None, Callable[[str], Any]] = {
    None: str,
    "int": int,
    "float": float,
    "bool": bool,
    "pattern": pattern,
}


@cache
def rows() -> list[Row]:
    """Return the rows of the table with all keys that argparse needs.

    Each row of ``megatron_flags.json`` has the ``flags`` that set one argument, and of the argument its name
    ``dest`` where that is not the first flag's, its ``default`` where it has one, and either the value that a
    flag ``sets`` by itself, or the ``type``, number (``nargs``, in argparse's words) and ``choices`` of the
    values after it.  They are those of the newest release: what another lacks or reads otherwise, the
    installed Megatron itself says (``ask_megatron``).  Flags without effect on a step are names in
    ``flag_effects.toml``.
    """
    table = json.loads(FILE.read_text(encoding="utf-8"))
    return [{"dest": name_of(row["flags"][0]), "default": None} | row for row in table]


@cache
def effects() -> Mapping[str, Any]:
    """Return the sections of ``flag_effects.toml`` (``flag_effects.table``)."""
    return tomllib.loads(EFFECTS.read_text(encoding="utf-8"))


@cache
def known_flags() -> dict[str, None]:
    """Return all flags that are known here, those without effect on a step included."""
    names = (name for names in effects()["without_effect"].values() for name in names.split())
    with_rows = (flag for flag in parser()._option_string_actions if flag.startswith("--"))
    return dict.fromkeys(
        [*with_rows, *(name if name[0] == "-" else f"--{name.replace('_', '-')}" for name in names)]
    )


def name_of(flag: str) -> str:
    """Return the name of the argument that argparse derives from ``flag``."""
    return flag.removeprefix("--").replace("-", "_")


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
    options = parser()._option_string_actions
    return {options[name].dest: values for name, values in by_name(words) if name in options}


def spelled(values: Mapping[str, Any]) -> list[str]:
    """Return arguments as words of a command line; None, and a default that no flag sets, is left out."""
    words = []
    for name, value in values.items():
        flag = None if value is None else flag_of(name, value)
        if flag is not None:
            words += [flag, *_values(flag, value)]
    return words


def _values(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return []
    if not isinstance(value, list | tuple):
        return [str(value)]
    if parser()._option_string_actions[flag].type is not pattern:
        return [str(member) for member in value]
    # Megatron reads a pattern of layers as one word, such as [0]*3+[1]*58.
    return ["+".join(f"[{mark}]*{len(list(alike))}" for mark, alike in groupby(value))]


def overridden(values: Mapping[str, Any], by: Sequence[str]) -> dict[str, Any]:
    """Return ``values`` without the arguments that ``by``, a command line, sets or rules out."""
    arguments = by_argument(by)
    ruled_out = {_EXCLUSIVE.get(name) for name in arguments}
    return {name: value for name, value in values.items() if name not in arguments and name not in ruled_out}
