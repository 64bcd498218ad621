"""Processes that a rank forks end with it, however it ends.

A rank that is killed does not stop the processes that it started. The one that writes checkpoints, and the
one that keeps its results, would wait for ever for a rank that is gone. Linux can send such processes a
signal when the rank ends, and other systems cannot, but all of them close the pipes of a process that ends.
"""

import os
import signal
import threading

_reading = _writing = -1
"""A pipe that nobody writes to, open for writing in the first process alone; -1 is no such end."""


def leave_no_orphans() -> None:
    """Let every process that is forked from now on, however far from this one, end with this one."""
    global _reading, _writing
    if _reading < 0:
        _reading, _writing = os.pipe()
        os.register_at_fork(after_in_child=_end_with_the_first)


def _end_with_the_first() -> None:
    global _writing
    if _writing >= 0:
        os.close(_writing)
        _writing = -1
    threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    os.read(_reading, 1)
    os.kill(os.getpid(), signal.SIGKILL)  # a process may have inherited handlers of all other signals
