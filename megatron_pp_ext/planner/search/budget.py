"""The processor time that a search may take, and why a search has stopped early."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

_BEFORE_COMPILING = 0.75
"""The part of them for replays where orders are compiled after."""


@dataclass
class SearchBudget:
    """A budget of ``seconds`` of processor time from now on; ``clock`` counts this process's."""

    seconds: float = inf
    clock: Callable[[], float] = time.process_time
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    @property
    def used(self) -> float:
        """The seconds that are used."""
        return self.clock() - self._start

    @property
    def words(self) -> str:
        """The most that a search costs, in words."""
        if self.seconds == inf:
            return "without a limit"
        return f"for at most {self.seconds:g} s of a processor (--cpu-seconds)"

    def is_spent(self, leaves_some: bool = False, has_result: bool = True) -> bool:
        """Whether all seconds are used; with ``leaves_some`` all but a reserve for compiling.

        A search that has no result yet may take twice as long.
        """
        if not has_result:
            return self.used > 2 * self.seconds
        return self.used > self.seconds * (_BEFORE_COMPILING if leaves_some else 1.0)


@dataclass(frozen=True, slots=True)
class Stopped:
    """Why a search ended before its end: ``left`` candidates have no step below ``least_seconds``.

    ``untried`` are arguments that leave something to the search, which it had no time to try.
    """

    why: str
    left: int
    least_seconds: float
    untried: tuple[str, ...] = ()

    def __str__(self) -> str:
        reasons = [self.why]
        if self.left:
            untried = "1 other was" if self.left == 1 else f"{self.left:,} others were"
            reasons.append(
                f"{untried} not looked at, none of which takes less than {self.least_seconds:.4g} s"
            )
        reasons += [f"--{name.replace('_', '-')} was not tried" for name in self.untried]
        return "; ".join(reasons if reasons[1:] else [self.why, "not all orders were compiled"])
