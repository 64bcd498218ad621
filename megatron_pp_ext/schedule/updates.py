"""The updates of schedules that never flush: each stage updates its weights as its own backwards are done."""

from dataclasses import dataclass

from megatron_pp_ext.schedule.families.pipedream import WeightVersion, most_versions
from megatron_pp_ext.schedule.families.round_robin import Replicas


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
