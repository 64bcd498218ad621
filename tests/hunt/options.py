"""The options that the hunts share."""

from pathlib import Path
from typing import Annotated

import typer

Cases = Annotated[int, typer.Option(help="How many to draw.")]
Seed = Annotated[int, typer.Option(help="Draws the same cases whenever it is the same.")]
Case = Annotated[int | None, typer.Option(help="Only this one of the seed.")]
Budget = Annotated[float, typer.Option(help="Minutes after which no further case begins.")]
Report = Annotated[Path | None, typer.Option(help="The page to write.", metavar="FILE")]
