"""What ranks keep on the device and on the host where the activations of a step wait there."""

from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.simulate import simulate


def kept_on_device(work: Workload, schedule: Schedule) -> tuple[float, ...]:
    """Return the most bytes of activations that each rank keeps on its device.

    A whole backward makes anew what was not kept, for a moment; it counts as if at the fullest one.
    """
    again = [0.0 if schedule.splits_backward else part.brief_in_whole for part in work.parts]
    peaks = simulate(schedule, work.costs).peak_activations
    return tuple(
        peak + max(again[stage] for stage in schedule.placement.stages_of(rank))
        for rank, peak in enumerate(peaks)
    )


def kept_on_host(work: Workload, schedule: Schedule) -> tuple[float, ...]:
    """Return the most bytes of activations that each rank has on the host."""
    return simulate(schedule, work.costs).peak_on_host
