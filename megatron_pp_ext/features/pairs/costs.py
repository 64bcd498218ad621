"""The token exchanges of experts that a pair of a forward and a backward hides."""

from collections.abc import Sequence

from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.costs import part_of_pair


def pair(job: Job, parts: Sequence[Part]) -> float:
    """Return ``Costs.pair``, on average over the ``parts`` of ``job``."""
    if not job.parallel.overlap_moe_expert_parallel_comm:
        return 1.0
    alone = sum(part.forward_seconds + part.backward_seconds for part in parts)
    return part_of_pair(sum(part.overlapped_together for part in parts), alone)
