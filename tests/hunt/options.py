"""What the hunts share: their options, and the cases that these choose."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

Cases = Annotated[int, typer.Option(help="How many to draw.")]
Seed = Annotated[int, typer.Option(help="Draws the same cases whenever it is the same.")]
Case = Annotated[int | None, typer.Option(help="Only this one of the seed.")]
Budget = Annotated[float, typer.Option(help="Minutes after which no further case begins.")]
Report = Annotated[Path | None, typer.Option(help="The page to write.", metavar="FILE")]


def chosen(cases: int, case: int | None, budget: float) -> Iterator[int]:
    """Yield the numbers of the cases to try, until the minutes of ``budget`` are over."""
    end = time.monotonic() + 60 * budget
    numbers = range(cases) if case is None else [case]
    return itertools.takewhile(lambda _: time.monotonic() <= end, numbers)
