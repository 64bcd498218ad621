"""The updates of schedules that never flush: each stage updates its weights as its own backwards are done."""

from dataclasses import dataclass
from enum import StrEnum

from megatron_pp_ext.schedule.families.pipedream import Weights, most_versions
from megatron_pp_ext.schedule.families.round_robin import Replicas


class DelayCorrection(StrEnum):
    """What is done about gradients of weights that have changed meanwhile."""

    ERROR_FEEDBACK = "error-feedback"
    """Microbatches compute with weights that are ahead by the delay (``runtime.look_ahead``)."""
    NESTEROV = "nesterov"
    """The optimizer's momentum is Nesterov's, by which the weights are ahead themselves: arXiv 2505.01099."""


@dataclass(frozen=True, slots=True)
class Updates:
    """The updates of a pipeline that never flushes, one every ``interval`` microbatches.

    ``replicas`` are those of its stages.  With ``waits`` the stages may wait for each other at every update,
    as under Megatron's own schedules.
    """

    interval: int
    weights: Weights
    waits: bool
    replicas: Replicas
    correction: DelayCorrection | None = None

    def delay(self, stage: int) -> int:
        """Return how many updates late the gradients of ``stage`` come at most, once the pipeline is full."""
        return most_versions(self.weights, stage, self.replicas, self.interval)

    def copies(self, stage: int) -> int:
        """Return how many copies of its weights ``stage`` keeps beside the optimizer's own."""
        delay = self.delay(stage)
        return delay + 1 if delay and self.correction is DelayCorrection.ERROR_FEEDBACK else delay
