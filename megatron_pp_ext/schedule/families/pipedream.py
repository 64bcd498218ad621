"""PipeDream (SOSP 2019): 1F1B without a flush, with replicated stages in turns, and the age of weights."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Self

from megatron_pp_ext.schedule.actions import Action, Announced, Kind, Orders
from megatron_pp_ext.schedule.families.phases import alternating
from megatron_pp_ext.schedule.placement import linear


@dataclass(frozen=True, slots=True)
class Replicas:
    """The number of replicas of each stage; ``counts`` (3, 1) is written 3-1 and takes 4 ranks.

    Stage s has its own number of replicas, a rank each; ranks go by stage, then by replica.  Replica q takes
    the microbatches q, q + r, q + 2r, ... of its r-fold stage, the forward and the backward of one on the
    same replica, so that every rank knows where a microbatch went.
    """

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
    return tuple(_replicated_order(replicas, rank, microbatches) for rank in range(replicas.ranks))


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


def _replicated_order(replicas: Replicas, rank: int, microbatches: int) -> tuple[Action, ...]:
    stage = replicas.stage_of(rank)
    numbers = replicas.turns(rank, microbatches)
    forwards = [Action(stage, Kind.F, microbatch) for microbatch in numbers]
    backwards = [Action(stage, Kind.B, microbatch) for microbatch in numbers]
    return tuple(alternating(forwards, backwards, replicas.warm_up(stage)))


class WeightVersion(StrEnum):
    """The version of its weights that a stage uses for a microbatch, in the forward and the backward.

    Microbatches are numbered through the run.  Version v of a stage's weights are its weights after v
    updates.  ``interval`` 1 with the latest weights is PipeDream; ``interval`` >= p with the weights before
    the latest update is PipeDream-2BW (arXiv 2006.09503, section 3.1).
    """

    LATEST = "latest"
    """The newest at the time of the forward: PipeDream's weight stashing."""
    SAME = "same"
    """On all stages the version that was the first stage's newest: PipeDream's vertical sync."""
    PREVIOUS = "previous"
    """On all stages the version before that which the microbatch's own update starts from: 2BW.

    The first stage has it in time only if interval >= p - 1, where p is the number of all replicas.
    """


def step(replicas: Replicas, interval: int, update: int, updates: int) -> tuple[tuple[Action, ...], ...]:
    """Return the order of each rank between updates number ``update`` and ``update + 1``, of ``updates``.

    Update 0 fills the pipeline; the last ones start no forward whose backward would not be reached.
    The backwards are of the ``interval`` microbatches of this update; the forwards of a replica are
    ahead of them by its ``warm_up``.  No action needs one of a later update: the forwards of a stage are at
    least as far ahead as the next stage's.

    ValueError for an update that is not there, and where replicas would do unequally many microbatches.

    The order is 1F1B's, over all microbatches of the whole run: after the first fill a rank alternates
    between one forward and one backward for ever.  A stage updates its weights after every ``interval``
    microbatches without waiting for another stage; where it has r replicas, each does an r-th of these
    microbatches, and they add up their gradients.  A training step is a rank's work between two of its
    updates; microbatches in flight at an update stay in flight.
    """
    replicas.require_turns(interval)
    if not 0 <= update < updates:
        raise ValueError(f"update must be in 0..{updates - 1}, got {update}")
    return tuple(_order(replicas, rank, interval, update, updates) for rank in range(replicas.ranks))


def _order(replicas: Replicas, rank: int, interval: int, update: int, updates: int) -> tuple[Action, ...]:
    stage = replicas.stage_of(rank)
    ahead, per_update = replicas.warm_up(stage), interval // replicas.counts[stage]
    microbatches = replicas.turns(rank, interval * updates)
    order = []
    if update == 0:
        order += [Action(stage, Kind.F, microbatch) for microbatch in microbatches[:ahead]]
    for turn in range(update * per_update, (update + 1) * per_update):
        if turn + ahead < len(microbatches):
            order.append(Action(stage, Kind.F, microbatches[turn + ahead]))
        order.append(Action(stage, Kind.B, microbatches[turn]))
    return tuple(order)


def version(weights: WeightVersion, microbatch: int, stage: int, replicas: Replicas, interval: int) -> int:
    """Return the version of ``stage``'s weights that ``microbatch`` uses.

    For n stages and an update every microbatch this is w(t+1) = w(t) - lr * grad f(w_1(t-n+1), ...,
    w_n(t)) under LATEST, f(w(t-n+1)) under SAME; for 2BW w(t+1) = w(t) - lr * grad f(w(t-1)).
    """
    if weights is WeightVersion.PREVIOUS:
        return max(0, microbatch // interval - 1)
    stage = 0 if weights is WeightVersion.SAME else stage
    count = replicas.counts[stage]
    return max(0, (microbatch // count - replicas.warm_up(stage)) // (interval // count))


def versions_kept(
    weights: WeightVersion, update: int, stage: int, replicas: Replicas, interval: int
) -> range:
    """Return the versions older than ``update`` that ``stage`` still needs after that many updates.

    They are those of all microbatches in flight or yet to come: at most ceil(in flight / interval) under
    LATEST, and one under PREVIOUS if interval >= p - 1.
    """
    return range(version(weights, update * interval, stage, replicas, interval), update)


def most_versions(weights: WeightVersion, stage: int, replicas: Replicas, interval: int) -> int:
    """Return how many versions in addition to the newest ``stage`` keeps once the pipeline is full."""
    return len(versions_kept(weights, replicas.ranks, stage, replicas, interval))


@dataclass(frozen=True, slots=True)
class Updates:
    """The updates of a pipeline that never flushes, one every ``interval`` microbatches.

    ``replicas`` has the copies of each stage.  With ``waits`` the stages may wait for each other at every
    update, as under Megatron's own schedules.
    """

    interval: int
    weights: WeightVersion
    waits: bool
    replicas: Replicas

    def copies(self, stage: int) -> int:
        """Return how many copies of its weights ``stage`` keeps in addition to the optimizer's own.

        Once the pipeline is full, its gradients are stale by as many updates at most.
        """
        return most_versions(self.weights, stage, self.replicas, self.interval)
