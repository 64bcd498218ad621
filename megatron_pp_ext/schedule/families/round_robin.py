"""1F1B-RR: 1F1B with replicated stages that take microbatches in turn (PipeDream, SOSP 2019, figure 8).

Stage s has its own number of replicas, a rank each; ranks go by stage, then by replica.  Replica q
takes the microbatches q, q + r, q + 2r, ... of its r-fold stage, the forward and the backward of one
on the same replica, so that every rank knows where a microbatch went.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.families.phases import alternating
from megatron_pp_ext.schedule.orders import Announced, Orders
from megatron_pp_ext.schedule.placement import linear


@dataclass(frozen=True, slots=True)
class Replicas:
    """The number of replicas of each stage; ``counts`` (3, 1) is written 3-1 and takes 4 ranks."""

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.counts) < 2 or min(self.counts) < 1:
            raise ValueError(
                f"replicas are {str(self)!r}, but must be 1 or more for each of 2 stages or more, as in 2-1"
            )

    @classmethod
    def straight(cls, stages: int) -> Self:
        """Return a pipeline of ``stages`` stages without replication."""
        return cls((1,) * stages)

    def __str__(self) -> str:
        return "-".join(map(str, self.counts))

    @property
    def ranks(self) -> int:
        """The number of replicas of all stages together."""
        return sum(self.counts)

    @property
    def stages(self) -> int:
        return len(self.counts)

    @property
    def is_straight(self) -> bool:
        """Whether no stage is replicated, so that its rank takes every microbatch."""
        return self.ranks == self.stages

    @property
    def full_round(self) -> int:
        """The fewest microbatches of which, in every stage, all replicas do equally many."""
        return math.lcm(*self.counts)

    def require_turns(self, microbatches: int) -> None:
        """Raise ValueError unless all replicas of a stage do equally many of ``microbatches``."""
        if microbatches < 1 or microbatches % self.full_round:
            raise ValueError(
                f"{microbatches} microbatch(es) cannot be shared out equally by the replicas {self}; take a "
                f"multiple of {self.full_round}"
            )

    def first_rank(self, stage: int) -> int:
        """Return the rank of replica 0 of ``stage``."""
        return sum(self.counts[:stage])

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs ``stage`` for ``microbatch``."""
        return self.first_rank(stage) + microbatch % self.counts[stage]

    def stage_of(self, rank: int) -> int:
        """Return the stage of which ``rank`` is a replica; ValueError if there is no such rank."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be in 0..{self.ranks - 1}, got {rank}")
        return bisect_right(list(accumulate(self.counts)), rank)

    def turns(self, rank: int, microbatches: int) -> range:
        """Return the numbers of the microbatches that ``rank`` takes, of the first ``microbatches``."""
        stage = self.stage_of(rank)
        return range(rank - self.first_rank(stage), microbatches, self.counts[stage])

    def ranks_of(self, stage: int) -> range:
        """Return the ranks of all replicas of ``stage``, which add up their gradients."""
        return range(self.first_rank(stage), self.first_rank(stage + 1))

    def placed(self, by_rank: Sequence[Sequence[Action]], announced: Announced = Announced.NOTHING) -> Orders:
        """Return the orders ``by_rank`` of all replicas, whose messages may announce their shapes."""
        return Orders(by_rank, linear(self.stages), announced=announced, replica_of=self.rank_of)

    def warm_up(self, stage: int) -> int:
        """Return the number of forwards that a replica of ``stage`` does before it begins to alternate.

        Of the M ranks, all from this stage on but one can have a microbatch of their own meanwhile:
        floor((M - 1 - ranks before) / replicas).  On the first stage that is NOAM - 1, where
        NOAM = ceil(M / replicas) is the paper's number of microbatches in flight a replica.
        """
        return (self.ranks - 1 - self.first_rank(stage)) // self.counts[stage]


def orders(replicas: Replicas, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the order of each rank for a step of ``microbatches`` microbatches that ends with a flush."""
    if microbatches < 1:
        raise ValueError(f"microbatches are {microbatches}, but must be 1 or more")
    return tuple(_order(replicas, rank, microbatches) for rank in range(replicas.ranks))


def evaluation(replicas: Replicas, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the order of each rank for an evaluation, of which all replicas do equally much."""
    replicas.require_turns(microbatches)
    return tuple(
        tuple(
            Action(replicas.stage_of(rank), Kind.F, microbatch)
            for microbatch in replicas.turns(rank, microbatches)
        )
        for rank in range(replicas.ranks)
    )


def _order(replicas: Replicas, rank: int, microbatches: int) -> tuple[Action, ...]:
    stage = replicas.stage_of(rank)
    numbers = replicas.turns(rank, microbatches)
    forwards = [Action(stage, Kind.F, microbatch) for microbatch in numbers]
    backwards = [Action(stage, Kind.B, microbatch) for microbatch in numbers]
    return tuple(alternating(forwards, backwards, replicas.warm_up(stage)))
