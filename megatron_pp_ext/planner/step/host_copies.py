"""What ranks keep on the device and on the host where the activations of a step wait there."""

from dataclasses import replace

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.planner.step.programs import Prepared
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.names import AUTO
from megatron_pp_ext.schedule.simulate import simulate


def kept_on_device(work: Workload, schedule: Schedule) -> tuple[float, ...]:
    """Return the most bytes of activations that each rank keeps on its device.

    A whole backward makes anew what was not kept, for a moment; it counts as if at the fullest one.
    """
    if schedule.splits_backward:
        return simulate(schedule, work.costs).peak_activations
    peaks = simulate(schedule, _kept_by_forwards(work)).peak_activations
    return tuple(
        peak + max(work.parts[stage].brief_in_whole for stage in schedule.placement.stages_of(rank))
        for rank, peak in enumerate(peaks)
    )


def kept_on_host(work: Workload, schedule: Schedule) -> tuple[float, ...]:
    """Return the most bytes of activations that each rank has on the host."""
    return simulate(schedule, _kept_by_forwards(work)).peak_on_host


def offloaded(work: Workload, request: Request, share: float | str) -> Schedule:
    """Return the schedule of ``request`` for ``work`` with this ``share`` of activations on the host."""
    with_copies = replace(request, offload=share)
    return make(with_copies, lambda stages, splits_head: work.costs, is_proved=True).schedule


def parts_on_device(work: Workload, request: Request, order: Prepared) -> tuple[float, ...]:
    """Return the part of each rank's most bytes of activations that copies of all that can leave keep there.

    ``order`` is that of ``request``, which has no copies.  Nearly the same parts stay under other layouts of
    the same stages.
    """
    copied = offloaded(work, request, AUTO)
    beside = work.head.activation if work.head else 0.0
    before, after = order.in_flight.peaks(work.parts, beside), kept_on_device(work, copied)
    return tuple(min(1.0, left / most) for left, most in zip(after, before, strict=True))


def _kept_by_forwards(work: Workload) -> Costs:
    """Return the costs with what a forward keeps, without what an I adds for a W (``Part.costs``)."""
    stages = (
        replace(stage, activation=part.after_forward, released_by_input_gradient=0.0)
        for stage, part in zip(work.costs.stages, work.parts, strict=True)
    )
    return replace(work.costs, stages=tuple(stages))
