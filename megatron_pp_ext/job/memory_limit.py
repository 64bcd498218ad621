"""--pipeline-memory-limit: one number for all pipeline ranks, or one for each, as in 0.9-0.8-0.8-0.7.

``compiler.limits.requested_budget`` states the meaning of the numbers.
"""

import math
from contextlib import suppress
from typing import NamedTuple

from megatron_pp_ext import amounts
from megatron_pp_ext.compiler.limits import LARGEST_FRACTION, Limit


class Names(NamedTuple):
    """The names of the limit and of the number of ranks, and the unit of an amount of memory."""

    limit: str
    ranks: str
    amount: str


BY_FLAG = Names("--pipeline-memory-limit", "--pipeline-model-parallel-size", "bytes, such as 40GB,")
BY_CALL = Names("memory_limit", "ranks", "an amount in the unit of costs,")


def read(value: float | str, ranks: int, names: Names = BY_FLAG) -> Limit:
    """Return ``value`` as a limit for ``ranks`` pipeline ranks; ValueError if it cannot be."""
    name, size, amount = names
    limits = numbers(value, names)
    if len(limits) == 1:
        return limits[0]
    if len(limits) != ranks:
        raise ValueError(
            f"{name} {value} is for {len(limits)} ranks, but {size} is {ranks}; "
            f"give one number for all ranks, or {ranks}"
        )
    if min(limits) <= LARGEST_FRACTION < max(limits):
        raise ValueError(
            f"{name} {value} mixes fractions, which are up to {LARGEST_FRACTION:g}, and others; give each "
            f"rank a fraction, or each {amount}"
        )
    return limits


def numbers(value: float | str, names: Names = BY_FLAG) -> tuple[float, ...]:
    """Return the numbers in ``value``, one or several; ValueError unless all are above 0."""
    limits: tuple[float, ...] = ()
    readings = ([value], str(value).split("-"))  # 1e-3 is one number, too
    for parts in () if isinstance(value, bool) else readings:
        with suppress(TypeError, ValueError, OverflowError):
            limits = limits or tuple(map(amounts.number, parts))
    if not limits or not all(0 < number < math.inf for number in limits):
        raise ValueError(
            f"{names.limit} is {value}, but must be a number above 0; give a fraction of 1F1B's peak, such "
            f"as 0.5, or {names.amount} for all ranks or, as in 0.9-0.8, for each"
        )
    return limits


def spelled(limit: Limit) -> str:
    """Return ``limit`` as the flag takes it."""
    limits = limit if isinstance(limit, tuple) else (limit,)
    return "-".join(f"{number:.0f}" if number == int(number) else repr(number) for number in limits)
