"""Reading JSON that a person may have written.

Every ValueError names the value, the rule and the fix; ``naming`` puts the file or the entry in front of it.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeGuard

from megatron_pp_ext.files import read_text


@contextmanager
def naming(where: object) -> Iterator[None]:
    """Put ``where`` in front of every ValueError that is raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def parse(text: str, fix: str) -> Any:
    """Return the content of the JSON ``text``; ValueError, which ends with ``fix``, if it is not JSON.

    Whole numbers that are too large to be counted with are refused too.
    """
    try:
        return json.loads(text, parse_int=_whole_number)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}): {fix}") from None


def _whole_number(digits: str) -> int:
    if len(digits) > sys.float_info.max_10_exp:
        raise ValueError(f"a number has {len(digits)} digits, too many to count with: correct it")
    return int(digits)


def read(path: Path, fix: str) -> Any:
    """Return the content of the JSON file ``path``; ValueError, as from ``parse``, if it is not JSON."""
    try:
        return parse(read_text(path), fix)
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON ({error}): {fix}") from None


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "", cutoff: float = 0.5) -> str:
    """Return a question with the one of ``names`` that resembles ``name``, or ``otherwise`` if none does."""
    nearest = get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"did you mean {nearest[0]!r}?" if nearest else otherwise


STRICT: Mapping[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""The ``__pydantic_config__`` of classes that are read from JSON: known names and exact types alone."""


def above(least: float) -> Any:
    """Return the argument of ``Annotated`` for a finite number above ``least``.

    Only within a ``type`` alias, which is evaluated where a file is read; see ``parse_as``.  The dataclass's
    ``STRICT`` does not reach into an alias.
    """
    return _field(gt=least, strict=True, allow_inf_nan=False)


def at_least(least: float) -> Any:
    """Return the argument of ``Annotated`` for a finite number of ``least`` or more; see ``above``."""
    return _field(ge=least, strict=True, allow_inf_nan=False)


def of_length(count: int) -> Any:
    """Return the argument of ``Annotated`` for a list of ``count`` values; see ``above``."""
    return _field(min_length=count, max_length=count)


def _field(**rule: Any) -> Any:
    from pydantic import Field

    return Field(**rule)


def one_of(*names: str) -> Any:
    """Return the argument of ``Annotated`` for one of the texts ``names``; see ``above``."""
    from pydantic import AfterValidator

    def require_name(name: str) -> str:
        if name not in names:
            raise ValueError(f"{name!r} is unknown: give one of {', '.join(names)}")
        return name

    return AfterValidator(require_name)


def printable() -> Any:
    """Return the argument of ``Annotated`` for a text that passes ``require_printable``."""
    from pydantic import AfterValidator

    return AfterValidator(require_printable)


def require_printable(text: str) -> str:
    """Return ``text``; ValueError for characters that are not printable.

    Terminals obey some of them, and a line break in a name ends the comment of a script that it is in.
    """
    if not text.isprintable():
        raise ValueError(f"{short(text)} has characters that cannot be printed: leave them out")
    return text


_RULES = {
    "dataclass_type": "an object",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "mapping_type": "an object",
    "too_short": "a list of {min_length} or more",
    "too_long": "a list of {max_length}",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of {ge:g} or more",
    "less_than_equal": "a number of {le:g} or less",
}
"""The rule for a value, by the type of pydantic's error."""


def parse_as[Read](kind: type[Read], text: str, fix: str) -> Read:
    """Return the JSON ``text`` as the dataclass ``kind``.

    ValueError, with the value, the rule and the fix, if it is none; ``fix`` is for a text that is no JSON.
    """
    # It takes a tenth of a second to import, which commands and jobs that read no such file do without.
    from pydantic import TypeAdapter, ValidationError

    form = TypeAdapter(kind)
    try:
        return form.validate_json(text)
    except ValidationError as invalid:
        error = invalid.errors()[0]
        if error["type"] == "json_invalid":
            raise ValueError(f"not JSON ({error['ctx']['error']}): {fix}") from None
        schema = form.json_schema() if error["type"] == "unexpected_keyword_argument" else {}
        raise ValueError(_in_words(error, json.loads(text), schema)) from None


def read_as[Read](kind: type[Read], path: Path, fix: str) -> Read:
    """Return the JSON file ``path`` as the dataclass ``kind``; ValueError as from ``parse_as``."""
    try:
        return parse_as(kind, read_text(path), fix)
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON ({error}): {fix}") from None


def _in_words(error: Mapping[str, Any], content: Any, schema: Mapping[str, Any]) -> str:
    """Return pydantic's ``error`` in ``content`` as value, rule and fix."""
    places = [place for place in error["loc"] if place != "[key]"]
    path = []
    for place in places[:-1]:
        content = content[place]
        has_name = isinstance(content, dict) and "name" in content
        path.append(repr(content["name"]) if has_name else str(place))
    name = str(places[-1]) if places else "it"
    if error["type"] == "value_error":
        path, words = [*map(str, places)], str(error["ctx"]["error"])
    elif error["type"] == "missing":
        words = f"{repr(name) if isinstance(places[-1], str) else f'value {name}'} is missing: add it"
    elif error["type"] == "unexpected_keyword_argument":
        objects = [schema, *schema.get("$defs", {}).values()]
        names = [name for kind in objects for name in kind.get("properties", ())]
        words = f"{name!r} is unknown: {did_you_mean(name, names, f'known are {", ".join(names)}')}"
    else:
        rule = _RULES.get(error["type"], error["msg"].lower()).format(**error.get("ctx", {}))
        words = f"{name} is {short(error['input'])}, but must be {rule}: correct it"
    return f"{' '.join(path)}: {words}" if path else words


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is a finite number.

    JSON's true and false are none, though Python's are, and NaN and Infinity are, though Python reads them.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def short(value: Any) -> str:
    """Return ``value`` as JSON, cut to 40 characters for a message."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
