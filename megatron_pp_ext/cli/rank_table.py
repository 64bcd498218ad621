"""A table with a column for each pipeline rank, in as many parts as an ordinary terminal needs."""

from collections.abc import Mapping, Sequence
from itertools import batched

from rich.table import Column, Table

from megatron_pp_ext.cli.report import console

_COLUMNS = 80
_BETWEEN = 2


def show(title: str, rows: Mapping[str, Sequence[str]]) -> None:
    """Print ``rows``, each with a text for every rank, under ``title``."""
    ranks = len(next(iter(rows.values())))
    names = max(map(len, (title, *rows))) + _BETWEEN
    widest = max(len(text) for texts in rows.values() for text in texts)
    for some in batched(range(ranks), max(1, (_COLUMNS - names) // (max(widest, 4) + _BETWEEN))):
        columns = (Column(str(rank), justify="right") for rank in some)
        table = Table(title, *columns, box=None, pad_edge=False, padding=(0, _BETWEEN, 0, 0))
        for name, texts in rows.items():
            table.add_row(name, *(texts[rank] for rank in some))
        console.print(table)
