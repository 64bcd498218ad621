"""A table that grows: a page is whole whenever somebody reads it, and a row that fails loses nothing else."""

import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.report import publish, table
from megatron_pp_ext.files import whole

Cells = Mapping[str, object]
"""A row by its columns."""

FAILED = "failed"
"""The column that a row has if it failed, with the reason."""

SECONDS = "seconds"
"""The column of what it took to measure a row."""


class Rows:
    """The rows of a part, which a page has as soon as they are there.

    ``only`` names the rows that are wanted; all are if it is empty.  ``written`` is called after each row.
    """

    def __init__(
        self,
        page: Path,
        title: str,
        about: str,
        bench: Bench,
        only: Collection[str],
        written: Callable[[], None],
    ) -> None:
        self.page, self.title, self.about, self.bench = page, title, about, bench
        self.only, self.written = only, written
        self.rows: dict[str, Cells] = {}
        self._write()

    @property
    def has_failed(self) -> bool:
        """Whether a row failed."""
        return any(FAILED in cells for cells in self.rows.values())

    def measure(self, name: str, measure: Callable[[], Cells], always: bool = False) -> bool:
        """Add the row that ``measure`` returns, and return whether it succeeded.

        A RuntimeError that it raises is the row's.  It is not called if the part has no time left, nor if the
        row is not wanted, unless ``always``.
        """
        if self.only and name not in self.only and not always:
            return True
        start = time.monotonic()
        try:
            self.bench.require_time()
            cells = measure()
        except RuntimeError as error:
            cells = {FAILED: str(error).replace(f"{self.bench.logs}/", "")}
        except KeyboardInterrupt:
            self.add(name, {FAILED: "stopped from outside"})
            raise
        self.add(name, {**cells, SECONDS: f"{time.monotonic() - start:.0f}"})
        print(f"{self.title}: {name}: {self.rows[name]}", file=sys.stderr, flush=True)
        return FAILED not in cells

    def add(self, name: str, cells: Cells) -> None:
        """Add a row, and write the page."""
        self.rows[name] = cells
        self._write()

    def _write(self) -> None:
        names = dict.fromkeys(column for cells in self.rows.values() for column in cells)
        columns = sorted(names, key=lambda column: (column == FAILED, column == SECONDS))
        rows = [
            (name, *("" if (cell := cells.get(column)) is None else cell for column in columns))
            for name, cells in self.rows.items()
        ]
        sections = [table(("", *columns), rows)] if rows else ["Nothing is measured yet."]
        with whole(self.page) as place:
            publish(place, self.title, self.about, *sections)
        self.written()
