"""What of a grid runs in `make test`; the rest, marked `wide`, is left to `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def first(number: int, cases: Iterable[Any]) -> list[Any]:
    """Return ``cases`` for ``parametrize``, all but the first ``number`` of them marked ``wide``.

    A case that is a tuple has a value for each of several arguments.
    """
    return [case if at < number else wide(case) for at, case in enumerate(cases)]


def wide(case: Any) -> Any:
    """Return one case of a grid, marked ``wide``; it keeps what marks it has."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.wide], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.wide)
