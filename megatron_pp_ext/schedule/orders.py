"""The orders of all ranks in a part of a run, and what decides where their messages go."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from megatron_pp_ext.schedule.actions import Action, Schedule
from megatron_pp_ext.schedule.copies import Copies
from megatron_pp_ext.schedule.placement import Placement

RankOf = Callable[[int, int], int]
"""The rank that runs a stage for a microbatch."""


class Announced(StrEnum):
    """The activations that announce their shapes, where shapes are not known before the step.

    Gradients announce none: they have the shapes of their activations.
    """

    NOTHING = "nothing"
    """All shapes are known."""
    FIRST = "first"
    """The first one of each microbatch that a rank gets; all others of the microbatch have this shape."""
    EVERY = "every"
    """Stages may change the shape."""


@dataclass(frozen=True, slots=True)
class Orders:
    """The order of every rank in a part of a run: a whole step, or one whose messages cross its ends.

    ``by_rank[r]`` are the actions of rank r, of the stages in ``placement``.  ``paired``, ``copies`` and
    ``durations`` are those of a ``Schedule``, ``announced`` the messages that announce their shapes.  Where
    stages have replicas, ``replica_of`` is the rank that runs a stage for a microbatch.
    """

    by_rank: Sequence[Sequence[Action]]
    placement: Placement
    paired: frozenset[Action] = frozenset()
    copies: Copies = field(default_factory=Copies)
    durations: Sequence[Sequence[int]] = ()
    announced: Announced = Announced.NOTHING
    replica_of: RankOf | None = None

    @classmethod
    def of(cls, schedule: Schedule, announced: Announced = Announced.NOTHING) -> Self:
        """Return the orders of ``schedule``."""
        return cls(
            schedule.orders,
            schedule.placement,
            schedule.paired,
            schedule.copies,
            schedule.durations,
            announced,
        )

    @property
    def stages(self) -> int:
        return self.placement.stages

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs ``stage`` for ``microbatch``."""
        if self.replica_of is not None:
            return self.replica_of(stage, microbatch)
        return self.placement.rank_of(stage)

    def is_announced(self, stage: int, microbatch: int) -> bool:
        """Whether the input of ``stage`` announces its shape, if it comes from another rank."""
        if self.announced is not Announced.FIRST:
            return self.announced is Announced.EVERY
        rank = self.rank_of(stage, microbatch)
        return all(self.rank_of(before, microbatch) != rank for before in range(stage))

    def is_repeated(self, stage: int, microbatch: int) -> bool:
        """Whether the input of ``stage`` has a shape that its rank has been told."""
        return self.announced is Announced.FIRST and not self.is_announced(stage, microbatch)
