"""The steps of a pipeline that never flushes: how long one takes, and what every rank keeps meanwhile.

A step ends with an update, ``Updates.interval`` microbatches after the one before.  With --pipeline-replicas
a rank of the workload stands for all replicas of its stage, which cost the same; the ranks here are the
replicas one by one, by stage, as training numbers them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from megatron_pp_ext.planner.step.activation_peaks import InFlight
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.buffers import most_buffers
from megatron_pp_ext.schedule.families import round_robin
from megatron_pp_ext.schedule.families.round_robin import Replicas
from megatron_pp_ext.schedule.launch_order import walk_over
from megatron_pp_ext.schedule.messages import SENDS_AHEAD
from megatron_pp_ext.schedule.running import seconds_of_an_update
from megatron_pp_ext.schedule.updates import Updates


class Kept(NamedTuple):
    """What a replica of ``stage`` keeps: bytes of activations, message buffers, old versions of weights."""

    stage: int
    activations: float
    messages: int
    versions: int


@dataclass(frozen=True)
class Unflushed:
    """The stages of ``work`` with ``updates`` between their microbatches."""

    work: Workload
    updates: Updates

    def kept(self) -> Iterator[Kept]:
        """Yield what every rank keeps once the pipeline is full."""
        replicas, (in_flight, buffers) = self.updates.replicas, _full(self.updates.replicas)
        for rank, messages in enumerate(buffers):
            stage = replicas.stage_of(rank)
            activations = in_flight.peak(rank, [self.work.parts[stage]])
            yield Kept(stage, activations, messages, self.updates.copies(stage))

    @cached_property
    def updating(self) -> list[float]:
        """The seconds in which each stage reduces its gradients and updates its weights, unless hidden.

        If one weight is on two stages, all wait for each other, and for the sum of its gradients.
        """
        waits = map(self.work.exposed, range(self.updates.replicas.stages))
        tied = self.work.tied_seconds
        return [wait.reduction + wait.update + wait.gathering + tied for wait in waits]

    @cached_property
    def working(self) -> list[float]:
        """The seconds that a replica of each stage computes between two updates."""
        counts = self.updates.replicas.counts
        return [
            self.updates.interval // count * (stage.forward + stage.seconds(Kind.B))
            for count, stage in zip(counts, self.work.costs.stages, strict=True)
        ]

    @property
    def busiest(self) -> tuple[int, float]:
        """The stage whose replicas are busiest, with the seconds of a step if they never waited."""
        busy = [sum(both) for both in zip(self.working, self.updating, strict=True)]
        return busy.index(max(busy)), max(busy)

    def seconds(self, updating: Sequence[float]) -> float:
        """Return the seconds of a step in a long run whose stages update in ``updating`` seconds."""
        updates = self.updates
        return seconds_of_an_update(
            updates.replicas, updates.interval, self.work.costs, updating, updates.waits
        )


@lru_cache(maxsize=8)
def _full(replicas: Replicas) -> tuple[InFlight, tuple[int, ...]]:
    """Return what is in flight on every rank, and its message buffers, in a run that fills the pipeline.

    It is as long as it takes every rank to have its most in flight, and to have sent as many messages as may
    be under way.
    """
    orders = round_robin.orders(replicas, (replicas.ranks + SENDS_AHEAD) * max(replicas.counts))
    walk = walk_over(replicas.placed(orders))
    return InFlight(walk.program), most_buffers(walk)
