"""One rank of a machine compiles a schedule at a time: the first one works, the others read its result."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from megatron_pp_ext.compiler.search import cache

LONGEST_WAIT = 60.0
"""The seconds that a rank waits while another one compiles; then it compiles, too.

On a free core, schedules for up to 64 ranks and 512 microbatches take less (docs/compiler.md).
"""


@contextmanager
def in_turn(name: str) -> Iterator[None]:
    """Wait until no other process compiles the schedule ``name`` of the cache, or for ``LONGEST_WAIT``.

    Who cannot wait compiles at the same time as the others, since all get the same schedule: where there is
    no place to keep schedules, on file systems without locks, and where the owner of a lock has died on
    another machine.
    """
    lock = FileLock(cache.directory() / f"{name}.lock", timeout=LONGEST_WAIT)
    problem = ""
    try:
        cache.directory().mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        problem = f"{lock.lock_file} was locked by another process for {LONGEST_WAIT:g} s"
    except (OSError, NotImplementedError) as error:  # the latter is filelock's where there is no flock
        problem = f"{lock.lock_file} cannot be locked ({getattr(error, 'strerror', None) or error})"
    log = logging.getLogger("megatron_pp_ext.compiler")
    level = log.level
    if problem and os.environ.get("LOCAL_RANK", "0") != "0":
        log.setLevel(logging.WARNING)  # all ranks would log the same
    elif problem:
        print(
            f"megatron_pp_ext: {problem}; the schedule is compiled without waiting for others",
            file=sys.stderr,
            flush=True,
        )
    try:
        yield
    finally:
        log.setLevel(level)
        lock.release()
