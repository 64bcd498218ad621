"""Reading JSON that a person may have written.

Every ValueError names the value, the rule and the fix; ``naming`` puts the file or the entry in front of it.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator
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


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.5) -> str:
    """Return a question with the one of ``known`` that resembles ``name``, or ``otherwise`` if none does."""
    nearest = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {nearest[0]!r}?" if nearest else otherwise


def require_names(content: Any, known: Iterable[str], needed: Iterable[str] = ()) -> None:
    """ValueError unless ``content`` is an object with names from ``known`` only, and with all ``needed``."""
    known = list(known)
    listed = ", ".join(known)
    if not isinstance(content, dict):
        raise ValueError(f"is {short(content)}, but must be an object with {listed}")
    for name in content:
        if name not in known:
            raise ValueError(f"{name!r} is unknown: {did_you_mean(name, known, f'known are {listed}')}")
    for name in needed:
        if name not in content:
            raise ValueError(f"{name!r} is missing: add it")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is a finite number.

    JSON's true and false are none, though Python's are, and NaN and Infinity are, though Python reads them.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def short(value: Any) -> str:
    """Return ``value`` as JSON, cut to 40 characters for a message."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
