"""Amounts of bytes as people write them: a number, with a unit after it or none, as in 60GB and 6.4e10."""

import re

_UNITS = {
    "": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_SHAPE = re.compile(r"(.*?)\s*([kmgt]i?b)?", re.DOTALL)

SMALLEST_MEMORY = 1e6
"""Fewer bytes than these are no memory of a device, but a number whose unit was forgotten."""


def number(amount: float | str) -> float:
    """Return the bytes that ``amount`` stands for; ValueError, as from ``float``, for any other text."""
    match = _SHAPE.fullmatch(str(amount).strip().lower())
    assert match is not None  # the first part takes whatever there is
    return float(match[1]) * _UNITS[match[2] or ""]


def read(text: float | str, name: str) -> float:
    """Return the bytes that ``text`` stands for; ValueError, with the flag ``name``, unless 0 or more."""
    try:
        amount = number(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < float("inf"):
        raise ValueError(
            f"{name} is {text}, but must be a number of bytes of 0 or more: write 60GB, 60GiB or 6e10"
        )
    return amount


def memory(text: float | str, name: str) -> float:
    """Return the bytes of a device's memory, as ``read`` does; ValueError for fewer than any device has."""
    amount = read(text, name)
    if amount < SMALLEST_MEMORY:
        raise ValueError(
            f"{name} is {text}, which is {amount:g} bytes, and no device has so few: give a unit, as in "
            f"{amount or 60:g}GB"
        )
    return amount
