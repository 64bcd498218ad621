"""Schedules without Python's garbage collector, with which large ones take up to three times as long."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Leave the collector off, unless it was off before: orders have many thousand actions without cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
