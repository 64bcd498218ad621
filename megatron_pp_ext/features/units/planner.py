"""What the slices of a step cost in an estimate, and what ranks keep of them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_pp_ext.features.units.costs import of_slices
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.step.workload import Addition
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs

if TYPE_CHECKING:
    from megatron_pp_ext.planner.step.workload import Workload


_KEYS_AND_VALUES = 2


class Sliced(Addition):
    """The seconds of slices, and the gradients of keys and values that wait for the slices before."""

    def in_step(self, work: "Workload", schedule: Schedule, costs: Costs) -> Costs:
        """See ``Addition``.

        ValueError where costs come from a file (--pipeline-costs), which is for whole sequences.
        """
        if not schedule.units:
            return costs
        if work.model.measured:
            raise ValueError(
                "--pipeline-slice-tokens needs the model's own costs, and --pipeline-costs has those of "
                "whole sequences: leave one out"
            )
        from megatron_pp_ext.planner.step.workload import Workload

        def costs_of(job: Job) -> Costs:
            return Workload(job, work.system, work.placement, work.data, work.layers).costs

        slices = schedule.microbatches // schedule.whole_microbatches
        return of_slices(costs_of, work.job, slices, schedule.units)

    def activations(
        self, work: "Workload", schedule: Schedule, peaks: tuple[float, ...]
    ) -> tuple[float, ...]:
        """See ``Addition``: those of slices, and the gradients of a sequence's keys and values."""
        if not schedule.units:
            return peaks
        return tuple(
            schedule.share * peak + sum(_owed(work, stage) for stage in work.placement.stages_of(rank))
            for rank, peak in enumerate(peaks)
        )

    def unmeasured(self, schedule: Schedule) -> Iterator[str]:
        if schedule.units:
            yield "in slices of sequences"


def _owed(work: "Workload", stage: int) -> float:
    """Return the bytes of the gradients of keys and values that later slices leave for earlier ones."""
    model, parallel = work.job.model, work.job.parallel
    tokens = model.seq_length * work.job.batch.micro_batch_size
    bytes_of = 2 if work.job.precision.is_half else 4
    width = _KEYS_AND_VALUES * model.key_heads * model.head_width / parallel.tensor_model_parallel_size
    return work.layers[stage] * tokens * width * bytes_of
