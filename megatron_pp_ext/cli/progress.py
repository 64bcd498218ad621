"""Says what a command waits for: a spinner on a terminal, elsewhere one line after two seconds."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from megatron_pp_ext.cli.report import console

_PATIENCE_SECONDS = 2.0


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show ``what`` is being done while the context lasts; on stderr where there is no terminal."""
    if console.is_terminal:
        with console.status(what):
            yield
        return
    stream = sys.stderr
    late = Timer(_PATIENCE_SECONDS, lambda: print(f"{what} ...", file=stream, flush=True))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
