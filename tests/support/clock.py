"""A clock for tests of timing: it stands still but for a tick a reading and for the time of work."""

TICK = 2.0**-20
"""The seconds that pass between two readings."""


class Clock:
    """Stands in for ``time.perf_counter``, so that a test's measurements are the same on any machine.

    The clocks of forked ranks go on from the same reading, each by itself.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._seconds = start

    def __call__(self) -> float:
        self._seconds += TICK
        return self._seconds

    def pass_by(self, seconds: float) -> None:
        """Let work take ``seconds``."""
        self._seconds += seconds
