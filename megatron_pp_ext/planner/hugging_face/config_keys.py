"""The keys of a config.json, of which each is used, known to change nothing, or refused by its name."""

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron_pp_ext.json_input import is_number, short

FILE = Path(__file__).with_name("config_keys.toml")

BY_FLAGS = "give Megatron's flags after -- in place of --model"


class Keys:
    """The ``values`` of a config.json, and ``defaults`` for keys that are missing, null or empty.

    ``notes`` are sentences on what the arguments that were read leave out.  Up to ``longest`` tokens a
    sequence is trained as the model would; None without a bound.
    All readers raise ValueError for a value that the key cannot have.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        present = {name: value for name, value in values.items() if value not in (None, [], {})}
        self._values = {**defaults, **present}
        self._used: set[str] = set()
        self.notes: list[str] = []
        self.longest: int | None = None

    def unused(self) -> dict[str, Any]:
        """Return the keys that nobody has read and that are not known to be without effect."""
        passed_over = self._used.union(_by_name("without_effect"))
        return {name: value for name, value in self._values.items() if name not in passed_over}

    def skip(self, *names: str) -> None:
        """Pass over ``names``, which change nothing in a model of this type."""
        self._used.update(names)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of ``name`` as it is."""
        self._used.add(name)
        return self._values.get(name, default)

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number of ``least`` or more; without a default, ValueError where it is missing."""
        value = self.get(name, default)
        if value is None:
            raise ValueError(f"{name} is missing: add it")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _wrong(name, value, f"a whole number of {least} or more")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """Return a whole number of 0 or more."""
        return self.size(name, default, least=0)

    def size_of(self, *names: str) -> int:
        """Return the size that goes by any of ``names``; ValueError where it has several values, or none."""
        sizes = {name: self.size(name) for name in names if self.get(name) is not None}
        if not sizes:
            raise ValueError(f"{' or '.join(names)} is missing: add it")
        (name, value), *duplicates = sizes.items()
        for other, again in duplicates:
            if again != value:
                raise ValueError(f"{other} is {again}, but {name} is {value}: take one out")
        return value

    def number(self, name: str, default: float, below: float = math.inf) -> float:
        """Return a finite number of 0 or more, and less than ``below``."""
        value = self.get(name, default)
        if not is_number(value) or not 0 <= value < below:
            to = "of 0 or more" if below == math.inf else f"of 0 or more and below {below:g}"
            raise _wrong(name, value, f"a finite number {to}")
        return float(value)

    def truth(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def one_of(self, name: str, texts: Iterable[str], default: str) -> str:
        """Return the value of ``name``, which has to be one of ``texts``."""
        value = self.get(name, default)
        choices = list(texts)
        if value not in choices:
            supported = " or ".join(map(short, choices))
            raise ValueError(f"{name} is {short(value)}, but only {supported} is supported: {BY_FLAGS}")
        return str(value)

    def require(self, name: str, expected: Any, why: str) -> None:
        """Raise ValueError with ``why`` unless ``name`` has the value ``expected`` or none."""
        value = self.get(name, expected)
        if value != expected or isinstance(value, bool) != isinstance(expected, bool):
            raise ValueError(
                f"{name} is {short(value)}, but must be {short(expected)}, since {why}: {BY_FLAGS}"
            )

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object; an empty one where there is none."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise _wrong(name, value, "an object")
        return value

    def by_layer(self, name: str, layers: int, marks: Mapping[Any, int]) -> list[int] | None:
        """Return the mark of each of the ``layers`` values of a list; None where there is no list.

        A text is a list of its letters where ``marks`` has them.
        """
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, str) and marks.keys() >= set(value):
            value = list(value)
        if not isinstance(value, list) or len(value) != layers:
            form = f"a list of {len(value)}" if isinstance(value, list) else short(value)
            raise ValueError(
                f"{name} is {form}, but must be a list with one entry a layer, {layers}: correct it"
            )
        strange = [entry for entry in value if not isinstance(entry, str | int) or entry not in marks]
        if strange:
            supported = " and ".join(map(short, marks))
            raise ValueError(
                f"{name} has {short(strange[0])}, but only {supported} are supported: {BY_FLAGS}"
            )
        return [marks[entry] for entry in value]

    def numbers(self, name: str) -> list[int]:
        """Return a list of whole numbers of 0 or more; an empty one where there is none."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
            raise _wrong(name, value, "a list of whole numbers of 0 or more")
        return list(value)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.size("num_hidden_layers")

    @property
    def positions(self) -> int | None:
        """The most tokens of a sequence; None where a file leaves them open, since they have no weights."""
        name = "max_position_embeddings"
        return None if self.get(name) is None else self.size(name)


def _wrong(name: str, value: Any, rule: str) -> ValueError:
    return ValueError(f"{name} is {short(value)}, but must be {rule}: correct it")


def frequency(marks: Sequence[int], marked: int) -> int | list[int]:
    """Return ``marks``, a 0 or 1 a layer, as a number where each n-th layer alone is marked by ``marked``.

    So Megatron reads the patterns of layers with windows, linear attention or positions.
    """
    at = [number for number, mark in enumerate(marks, 1) if mark == marked]
    if at and all((number % at[0] == 0) == (mark == marked) for number, mark in enumerate(marks, 1)):
        return at[0]
    return list(marks)


def unknown_key(name: str, value: object) -> str:
    """Return why the key ``name``, which nobody reads, is refused."""
    reason = _by_name("refused").get(name)
    if reason is not None:
        return f"{name} is {short(value)}, but {reason}: {BY_FLAGS}"
    return (
        f"{name} is {short(value)}, but no such key is known for this model_type: take it out of a copy of "
        f"the file if neither time nor memory depends on it, or {BY_FLAGS}"
    )


@cache
def _by_name(section: str) -> dict[str, str]:
    """Return the keys of a section of ``FILE``, and the group that each is in."""
    groups = tomllib.loads(FILE.read_text(encoding="utf-8"))[section]
    return {name: group for group, names in groups.items() for name in names.split()}
