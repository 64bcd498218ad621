"""Which messages announce their shapes, where shapes are not known before the step.

Gradients announce none: they have the shapes of their activations.
"""

from collections.abc import Callable
from enum import StrEnum

RankOf = Callable[[int, int], int]
"""The rank that runs a stage for a microbatch."""

IsAnnounced = Callable[[int, int], bool]
"""Whether the input of a stage announces its shape for a microbatch, if it comes from another rank."""


class Announced(StrEnum):
    """The activations that announce their shapes."""

    NOTHING = "nothing"
    """All shapes are known."""
    FIRST = "first"
    """The first one of each microbatch that a rank gets; all others of the microbatch have this shape."""
    EVERY = "every"
    """Stages may change the shape."""


def announced_inputs(announced: Announced, rank_of: RankOf) -> IsAnnounced | None:
    """Return which inputs of stages announce their shapes; None where there are no such."""
    if announced is Announced.NOTHING:
        return None

    def is_announced(stage: int, microbatch: int) -> bool:
        if announced is Announced.EVERY:
            return True
        rank = rank_of(stage, microbatch)
        return all(rank_of(before, microbatch) != rank for before in range(stage))

    return is_announced
