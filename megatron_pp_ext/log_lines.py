"""Shows the progress that long work logs, at INFO and by the standard loggers of its modules.

Whoever starts the work decides where the lines go.  Without that nobody sees them, as is usual for INFO.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())


def show_all(logger: str, show: Callable[[str], None]) -> logging.Handler:
    """Pass each line of ``logger`` and those below it to ``show`` alone, and return what does so."""
    source, lines = logging.getLogger(logger), _Lines(show)
    source.addHandler(lines)
    source.setLevel(logging.INFO)
    source.propagate = False  # a handler of the root would show them a second time
    return lines


@contextmanager
def shown(logger: str, show: Callable[[str], None]) -> Iterator[None]:
    """Do so while the context lasts."""
    source = logging.getLogger(logger)
    before = source.level, source.propagate
    lines = show_all(logger, show)
    try:
        yield
    finally:
        source.removeHandler(lines)
        source.setLevel(before[0])
        source.propagate = before[1]
