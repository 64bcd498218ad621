"""Which messages announce their shapes, where shapes are not known before the step.

Gradients announce none: they have the shapes of their activations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

RankOf = Callable[[int, int], int]
"""The rank that runs a stage for a microbatch."""


class Announced(StrEnum):
    """The activations that announce their shapes."""

    NOTHING = "nothing"
    """All shapes are known."""
    FIRST = "first"
    """The first one of each microbatch that a rank gets; all others of the microbatch have this shape."""
    EVERY = "every"
    """Stages may change the shape."""


@dataclass(frozen=True, slots=True)
class Announcements:
    """The activations that announce their shapes, where ``rank_of`` has the rank of each stage."""

    announced: Announced
    rank_of: RankOf

    def is_announced(self, stage: int, microbatch: int) -> bool:
        """Whether the input of ``stage`` announces its shape, if it comes from another rank."""
        if self.announced is not Announced.FIRST:
            return self.announced is Announced.EVERY
        rank = self.rank_of(stage, microbatch)
        return all(self.rank_of(before, microbatch) != rank for before in range(stage))

    def is_repeated(self, stage: int, microbatch: int) -> bool:
        """Whether the input of ``stage`` has a shape that its rank has been told."""
        return self.announced is Announced.FIRST and not self.is_announced(stage, microbatch)
