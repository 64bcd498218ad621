"""A pause of Python's garbage collector, which would look for cycles among millions of objects in vain."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Free objects by their counts alone.

    Orders are lists of many thousand actions, none of which refers back, and a search builds hundreds.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
