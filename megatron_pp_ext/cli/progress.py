"""Reports the work that a command waits for: a spinner on a terminal, elsewhere a line after two seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Timer

from rich.text import Text

from megatron_pp_ext import log_lines
from megatron_pp_ext.cli.report import console

_PATIENCE_SECONDS = 2.0

_PAUSE_SECONDS = 10.0
"""The least time between two lines."""


@contextmanager
def waiting(work: str) -> Iterator[Callable[[str], None]]:
    """Show that ``work`` is being done while the context lasts; on stderr where there is no terminal.

    Progress that the package logs meanwhile is shown after it, and so are lines passed to the function
    that this yields.
    """
    if console.is_terminal:
        # As Text, since names of files may look like markup.
        with console.status(Text(work)) as status:

            def update(line: str) -> None:
                status.update(Text(f"{work}: {line}"))

            with heard(update):
                yield update
        return
    lines = _ProgressLines(work)
    late = Timer(_PATIENCE_SECONDS, lines.show)
    late.daemon = True
    late.start()
    try:
        with heard(lines.take):
            yield lines.take
    finally:
        late.cancel()


def heard(show: Callable[[str], None]) -> AbstractContextManager[None]:
    """Return the context in which ``show`` gets the progress that the package logs."""
    return log_lines.shown("megatron_pp_ext", show)


class _ProgressLines:
    """The latest line about ``what``, for stderr: shown when asked for, and from then on now and then."""

    def __init__(self, work: str) -> None:
        self._what = self._latest = work
        self._stream = sys.stderr
        self._next = float("inf")

    def show(self) -> None:
        print(f"{self._latest} ...", file=self._stream, flush=True)
        self._next = time.monotonic() + _PAUSE_SECONDS

    def take(self, line: str) -> None:
        self._latest = f"{self._what}: {line}"
        if time.monotonic() >= self._next:
            self.show()
