"""The processor time of a process on its machine, as far as the system reports."""

import os
from pathlib import Path
from typing import NamedTuple, Self

_SCHEDSTAT = Path("/proc/self/schedstat")
"""Nanoseconds that the main thread ran, and that it waited while it could run (Linux, sched-stats)."""


MOST_WAITED = 0.1
"""The most of its time that a timed process may wait for a processor: its work seems as much longer."""


class ProcessorTime(NamedTuple):
    """The nanoseconds for which the main thread has run, and for which it has waited for a processor."""

    ran: int = 0
    waited: int = 0

    @classmethod
    def now(cls) -> Self:
        """Return both since the process began; zeros where the system does not report it."""
        try:
            ran, waited, *_ = map(int, _SCHEDSTAT.read_text(encoding="ascii").split())
        except (OSError, ValueError):
            return cls()
        return cls(ran, waited)

    def waited_since(self, before: Self) -> float | None:
        """Return the part of the time since ``before`` for which it waited; None where that is not known."""
        ran, waited = self.ran - before.ran, self.waited - before.waited
        return waited / (ran + waited) if ran else None


def load() -> float | None:
    """Return the load average of the last minute divided by the processors; None where there is none."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return None
