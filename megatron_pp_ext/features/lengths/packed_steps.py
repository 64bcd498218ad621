"""How long steps take with documents in given microbatches of replicas, by simulation."""

from collections.abc import Sequence
from functools import lru_cache

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.lengths.length_costs import LengthCosts
from megatron_pp_ext.features.lengths.microbatches import Microbatches
from megatron_pp_ext.features.lengths.plan import Planner
from megatron_pp_ext.schedule.costs import Costs

Share = Sequence[Sequence[int]]
"""The numbers of the documents in each microbatch of a replica."""

_HEAVIEST = 3
"""How many of the replicas with the most work are timed where packings are compared roughly."""


class PackedSteps:
    """Times packings of documents with these ``lengths``, in any unit.

    They run under ``schedule`` with so many pipeline ``ranks`` and ``chunks`` a rank, their microbatches
    ordered by its rule.  A document of ``equal_at`` tokens takes as long for attention as for all else, and a
    microbatch costs ``overhead`` tokens on top of its own.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        schedule: str,
        ranks: int,
        chunks: int | None,
        equal_at: float,
        overhead: float,
    ) -> None:
        self._lengths, self._overhead = lengths, overhead
        self._pipeline, self._equal_at = (schedule, ranks, chunks), equal_at

    def seconds(self, found: Sequence[Share]) -> float:
        """Return how long the slowest replica takes; ValueError where the schedule cannot be."""
        return max(map(self._of_replica, found))

    def roughly(self, found: Sequence[Share]) -> float:
        """Return the same of the replicas with the most work, in less time."""
        return self.seconds(sorted(found, key=self._work)[-_HEAVIEST:])

    def _work(self, share: Share) -> float:
        lengths = [self._lengths[place] for part in share for place in part]
        return sum(length + length * length / self._equal_at for length in lengths)

    def _of_replica(self, share: Share) -> float:
        schedule, ranks, chunks = self._pipeline
        planner = _planner(schedule, ranks, len(share), chunks)
        unit = Costs.per_rank(ranks, planner.schedule.placement.chunks)
        costs = LengthCosts.with_attention(unit, 1, self._equal_at)
        step = Microbatches.of([self._lengths[place] for place in part] for part in share)
        return planner.plan(costs.of(step, self._overhead), "rule").seconds


@lru_cache(maxsize=64)
def _planner(schedule: str, ranks: int, microbatches: int, chunks: int | None) -> Planner:
    """Return the planner of a schedule, which many steps need."""
    return Planner(make(named(schedule, ranks, microbatches, chunks)).schedule)
