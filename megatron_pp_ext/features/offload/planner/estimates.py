"""The memory of ranks, on the device and on the host, where activations are offloaded."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_pp_ext.planner.step.additions import Addition
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate

if TYPE_CHECKING:
    from megatron_pp_ext.planner.step.estimate import Estimate
    from megatron_pp_ext.planner.step.workload import Workload


class Offloaded(Addition):
    """The seconds of copies, and the activations that stay on the device."""

    def costs(self, work: "Workload", costs: Costs) -> Costs:
        """See ``Addition``: a copy is as large as the activations of a forward.

        ValueError for a system that describes no host.
        """
        if work.job.pipeline.pipeline_offload is None:
            return costs
        host = work.system.host_beside_others
        if host is None:
            raise ValueError(
                f"system {work.system.name} describes no host, which --pipeline-offload needs: give it host"
            )
        rate, copied = host.bytes_per_second, zip(costs.stages, work.parts, strict=True)
        stages = tuple(replace(stage, copy=part.after_forward / rate) for stage, part in copied)
        return replace(costs, stages=stages)

    def activations(
        self, work: "Workload", schedule: Schedule, peaks: tuple[float, ...]
    ) -> tuple[float, ...]:
        """See ``Addition``: copies take no memory of their own on the device."""
        if not schedule.copies:
            return peaks
        return tuple(map(min, peaks, kept_on_device(work, schedule)))

    def completed(self, estimate: "Estimate", work: "Workload", schedule: Schedule) -> "Estimate":
        """See ``Addition``: the host memory of activations."""
        return replace(estimate, host_bytes=kept_on_host(work, schedule)) if schedule.copies else estimate

    def lines(self, estimate: "Estimate") -> Iterator[str]:
        if estimate.host_bytes:
            yield f"on the host: {max(estimate.host_bytes) / 1e9:.2f} GB of the rank with most there"


def kept_on_device(work: "Workload", schedule: Schedule) -> tuple[float, ...]:
    """Return the most bytes of activations that each rank keeps on its device."""
    return simulate(schedule, work.costs).peak_activations


def kept_on_host(work: "Workload", schedule: Schedule) -> tuple[float, ...]:
    """Return the most bytes of activations that each rank has on the host."""
    return simulate(schedule, work.costs).peak_on_host
