"""Makes a case that differs as plain as it can be while it still differs.

This is delta debugging (Zeller and Hildebrandt, IEEE TSE 2002) over the choices of a row: halves of what is
not plain are made plain, then smaller parts, and at last one by one until none can be.
"""

from collections.abc import Callable

from tests.hunt.fuzz.factors import Row, is_legal, levels, unusual
from tests.hunt.fuzz.job import has_checkpoint


def shrunk(row: Row, still_differs: Callable[[Row], bool]) -> Row:
    """Return the row in which none of its unusual choices can be made plain alone."""
    for one in ("measures", "host", "order", "slices"):
        if row[one] != "none" and still_differs({**row, one: "none"}):
            row = {**row, one: "none"}
    size = len(list(unusual(row)))
    while size:
        names = list(unusual(row))
        for at in range(0, len(names), size):
            plainer = _plain(row, names[at : at + size])
            if is_legal(plainer) and still_differs(plainer):
                row = plainer
        if size == 1 and len(list(unusual(row))) < len(names):
            continue
        size = size // 2
    return row


def _plain(row: Row, factors: list[str]) -> Row:
    plainer = {**row, **{factor: levels(factor)[0] for factor in factors}}
    return plainer if has_checkpoint(plainer) else {**plainer, "resume": "none"}
