"""--pipeline-offload: the copies of activations to the host that a requested schedule gets.

All ranks plan them from the same costs, so that they agree without a message.
"""

from dataclasses import replace

from megatron_pp_ext.compiler.limits import of_each_rank
from megatron_pp_ext.job import memory_limit
from megatron_pp_ext.job.request import Request
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.longer_plans import with_whole_share, within_limits
from megatron_pp_ext.schedule.names import AUTO
from megatron_pp_ext.schedule.offload import with_share, within, without_copies
from megatron_pp_ext.schedule.simulate import Timeline

HOST_LINK = 25e9
"""The bytes a second, each way, that are counted on where the machine is not known: those of PCIe 4 x16."""

PART_OF_FORWARD = 0.5
"""The part of a forward that a copy counts as where it is not known how many bytes a stage keeps."""


def requested(
    request: Request,
    given: float | str,
    limit: float | str | None,
    name: str = "--pipeline-offload",
    limit_names: memory_limit.Names = memory_limit.BY_FLAG,
) -> Request:
    """Return ``request`` with what is ``given`` as ``name``, and with the ``limit`` that copies have to keep.

    ValueError, in one line, for a share that is not above 0 and at most 1.
    """
    if given == AUTO:
        if limit is not None and request.limit is None:
            request = replace(request, limit=memory_limit.read(limit, request.ranks, limit_names))
        return replace(request, offload=AUTO)
    try:
        share = float(given or 0)
    except (TypeError, ValueError):
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(
            f"{name} is {given}, but must be a share above 0 and at most 1, or {AUTO}; give one, such as 0.5"
        )
    return replace(request, offload=share)


def with_copy_seconds(costs: Costs) -> Costs:
    """Return ``costs`` with the seconds of copies, where a file has not given them.

    Costs that count the weights of stages count activations in bytes, too, and those go over ``HOST_LINK``.
    In others a copy takes ``PART_OF_FORWARD``.
    """
    if any(stage.copy for stage in costs.stages):
        return costs
    if costs.has_parameters:
        return costs.copied_at(1 / HOST_LINK)
    stages = (replace(stage, copy=PART_OF_FORWARD * stage.forward) for stage in costs.stages)
    return replace(costs, stages=tuple(stages))


def planned(schedule: Schedule, request: Request, costs: Costs) -> tuple[Schedule, float]:
    """Return ``schedule`` with the copies that ``request`` asks for, and the part by which a step grows.

    ``costs`` are those of its stages.  ValueError, in one line, where no copies keep the memory limit.
    """
    if request.offload == AUTO and catalog.abilities(request.schedule).is_compiled:
        return schedule, 0.0  # the compiler has chosen
    costs = with_copy_seconds(costs)
    alone = without_copies(schedule, costs)
    timeline = _timeline(schedule, request, costs)
    return timeline.schedule, timeline.makespan / alone.makespan - 1


def _timeline(schedule: Schedule, request: Request, costs: Costs) -> Timeline:
    if request.offload not in (None, AUTO):
        return with_whole_share(schedule, costs, float(request.offload))
    if request.limit is None:
        return with_share(schedule, costs, 1.0)
    limit, counted = request.limited(costs)
    limits = of_each_rank(limit, request.ranks)
    timeline = within_limits(schedule, counted, limits)
    if timeline is not None:
        return timeline
    peaks = within(schedule, counted, limits).peak_memory
    rank = max(range(request.ranks), key=lambda rank: peaks[rank] - limits[rank])
    raise ValueError(
        f"memory limit: rank {rank} may keep {limits[rank]:.4g}, but keeps {peaks[rank]:.4g} "
        f"under {schedule.name} with all on the host that comes back in time; raise it, or choose flex"
    )
