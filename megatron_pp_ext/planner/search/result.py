"""What a search looks at and finds, the processor time that it may take, and why the others are slower."""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import Self

from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.replays import Evaluated
from megatron_pp_ext.planner.step.estimate import RankMemory

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
    """Why a search ended before its end: ``remaining`` candidates have no step below ``least_seconds``.

    ``untried`` are arguments that leave something to the search, which it had no time to try.
    """

    why: str
    remaining: int
    least_seconds: float
    untried: tuple[str, ...] = ()

    def __str__(self) -> str:
        reasons = [self.why]
        if self.remaining:
            untried = "1 other was" if self.remaining == 1 else f"{self.remaining:,} others were"
            reasons.append(
                f"{untried} not looked at, none of which takes less than {self.least_seconds:.4g} s"
            )
        reasons += [f"--{name.replace('_', '-')} was not tried" for name in self.untried]
        return "; ".join(reasons if reasons[1:] else [self.why, "not all orders were compiled"])


LEVELS = (1.0, 0.75, 0.5, 0.375, 0.25)
"""The fractions of the memory for each of which a search looks for the shortest step."""


ALIKE = 0.02
"""The part by which the step of another schedule may be longer and counts as nearly the same."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """A candidate, apart from its schedule, with lower bounds on its step and on its fullest rank's bytes."""

    bound: float
    least: float
    sized: Candidate
    schedule: str

    @property
    def candidate(self) -> Candidate:
        """The candidate, which is made where it is looked at."""
        return replace(self.sized, schedule=self.schedule)


@dataclass
class SearchResult:
    """The best candidates by step, and those whose step no other has with as little memory.

    ``best`` has one schedule of candidates that differ in nothing else.  ``alike`` has, by each of the best,
    the other schedules with which its step is at most ``ALIKE`` longer; those of the last of the best need
    not be complete.  ``frontier`` has, by rising memory, each candidate of all that were timed whose step is
    shorter than those of less memory, and ``for_less_memory`` those of ``LEVELS``.  ``too_large`` are the
    three candidates with the lowest bounds that only memory keeps out, each with its fullest rank.  ``legal``
    counts all candidates, ``unfit`` those that fit in no order, ``replayed`` those that were timed action by
    action, and ``left_out`` those that were not, since others with the option of a feature were, by words
    about them (``Variants``).
    ``stopped`` is None where the search went to its end.
    """

    best: list[Evaluated] = field(default_factory=list)
    alike: dict[Candidate, list[Evaluated]] = field(default_factory=dict)
    frontier: list[Evaluated] = field(default_factory=list)
    for_less_memory: list[Evaluated] = field(default_factory=list)
    too_large: list[tuple[Candidate, RankMemory]] = field(default_factory=list)
    legal: int = 0
    unfit: int = 0
    replayed: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    stopped: Stopped | None = None

    def without(self, refused: Collection[Candidate]) -> Self:
        """Return the result without the candidates that are ``refused``.

        In the place of one of the best comes the first of those that are nearly as fast.
        """
        best, alike = [], {}
        for first in self.best:
            rest = [row for row in (first, *self.alike[first.candidate]) if row.candidate not in refused]
            if rest:
                best.append(rest[0])
                alike[rest[0].candidate] = rest[1:]
        frontier, for_less_memory = (
            [row for row in rows if row.candidate not in refused]
            for rows in (self.frontier, self.for_less_memory)
        )
        return replace(self, best=best, alike=alike, frontier=frontier, for_less_memory=for_less_memory)

    def add_to_frontier(self, evaluated: Evaluated) -> None:
        """Take ``evaluated`` into the frontier where it belongs there, in the place of what it beats."""
        rising = sorted([*self.frontier, evaluated], key=lambda row: (row.bytes, row.seconds))
        self.frontier = []
        for row in rising:
            if not self.frontier or row.seconds < self.frontier[-1].seconds:
                self.frontier.append(row)

    @property
    def named(self) -> list[Evaluated]:
        """The best, each with the schedules that are nearly as fast after it."""
        return [evaluated for first in self.best for evaluated in (first, *self.alike[first.candidate])]


class Compiles(Enum):
    """Whether orders are compiled: never, in addition to the best of the families, or instead of them."""

    NEVER = "never"
    TOO = "too"
    ONLY = "only"


_NAMED = 0.002
"""The least difference, as a fraction of the best step, that is named."""


def why(best: Evaluated, other: Evaluated) -> str:
    """Return where ``other`` loses its seconds, the largest loss first; empty for the best itself."""
    losses = [
        (gain, name)
        for (name, more), (_, less) in zip(_seconds(other), _seconds(best), strict=True)
        if (gain := more - less) > _NAMED * best.estimate.step_seconds
    ]
    recompute = other.candidate.recompute
    reasons = []
    for gain, name in sorted(losses, reverse=True):
        is_recomputing = name == "work" and recompute.granularity and recompute != best.candidate.recompute
        reasons.append(f"{name} +{gain:.3g} s" + (f" ({recompute.name})" if is_recomputing else ""))
    return ", ".join(reasons)


def _seconds(evaluated: Evaluated) -> list[tuple[str, float]]:
    """Return the parts of a step: an average rank's work and idling, and the time after the pipeline."""
    estimate = evaluated.estimate
    idle = estimate.bubble * estimate.pipeline_seconds
    return [
        ("work", estimate.pipeline_seconds - idle),
        ("bubble", idle),
        ("reductions and update", estimate.other_seconds),
    ]
