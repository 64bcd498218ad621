"""Signals that end a command: batch systems' and terminals' signals count as Ctrl-C."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_as_by_the_keyboard() -> Iterator[None]:
    """Treat SIGTERM of a batch system and SIGHUP of a lost terminal like Ctrl-C, so that runs are ended."""
    process = os.getpid()

    def interrupt(number: int, frame: object) -> None:
        if os.getpid() != process:
            os._exit(128 + number)  # a forked process ends as it would without this handler
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
