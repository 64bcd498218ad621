"""The results of a search, and its counts."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self

from megatron_pp_ext.planner.search.budget import Stopped
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.replays import Evaluated
from megatron_pp_ext.planner.step.estimate import RankMemory

LEVELS = (1.0, 0.75, 0.5, 0.375, 0.25)
"""The fractions of the memory for each of which the frontier holds the shortest step."""


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
    """The best candidates by step, and the shortest step for each fraction of the memory.

    ``best`` has one schedule of candidates that differ in nothing else.  ``alike`` has, by each of the best,
    the other schedules with which its step is at most ``ALIKE`` longer; those of the last of the best need
    not be complete.  ``too_large`` are the three candidates with the lowest bounds that only memory keeps
    out, each with its fullest rank.  ``legal`` counts all candidates, ``unfit`` those that fit in no order,
    ``replayed`` those that were timed action by action.  ``stopped`` is None where the search
    went to its end.
    """

    best: list[Evaluated] = field(default_factory=list)
    alike: dict[Candidate, list[Evaluated]] = field(default_factory=dict)
    frontier: list[Evaluated] = field(default_factory=list)
    too_large: list[tuple[Candidate, RankMemory]] = field(default_factory=list)
    legal: int = 0
    unfit: int = 0
    replayed: int = 0
    stopped: Stopped | None = None

    def without(self, refused: Collection[Candidate]) -> Self:
        """Return the result without the candidates that are ``refused``.

        In the place of one of the best comes the first of those that are nearly as fast.
        """
        best, alike = [], {}
        for first in self.best:
            left = [one for one in (first, *self.alike[first.candidate]) if one.candidate not in refused]
            if left:
                best.append(left[0])
                alike[left[0].candidate] = left[1:]
        frontier = [one for one in self.frontier if one.candidate not in refused]
        return replace(self, best=best, alike=alike, frontier=frontier)

    @property
    def named(self) -> list[Evaluated]:
        """The best, each with the schedules that are nearly as fast after it."""
        return [evaluated for first in self.best for evaluated in (first, *self.alike[first.candidate])]


class Compiles(Enum):
    """Whether orders are compiled: never, in addition to the best of the families, or instead of them."""

    NEVER = "never"
    TOO = "too"
    ONLY = "only"
