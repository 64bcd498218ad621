"""What the slices of a step cost in an estimate, and what ranks keep of them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_pp_ext.features.units.costs import of_slices, peaks_of
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.step.workload import Addition
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs, UnitCosts

if TYPE_CHECKING:
    from megatron_pp_ext.planner.step.workload import Workload


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
        return _costs_of(work, schedule)

    def activations(
        self, work: "Workload", schedule: Schedule, peaks: tuple[float, ...]
    ) -> tuple[float, ...]:
        """See ``Addition``: those of slices, and the gradients of a sequence's keys and values."""
        if not schedule.units:
            return peaks
        return peaks_of(schedule, _costs_of(work, schedule))

    def unmeasured(self, schedule: Schedule) -> Iterator[str]:
        if schedule.units:
            yield "in slices of sequences"


def _costs_of(work: "Workload", schedule: Schedule) -> UnitCosts:
    from megatron_pp_ext.planner.step.workload import Workload

    def costs_of(job: Job) -> Costs:
        return Workload(job, work.system, work.placement, work.data, work.layers).costs

    return of_slices(costs_of, work.job, schedule.units)
