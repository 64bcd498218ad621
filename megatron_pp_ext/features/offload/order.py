"""The pass of --pipeline-offload: the copies of activations to the host that a requested schedule gets.

All ranks plan them from the same costs, so that they agree without a message.
"""

from contextlib import suppress
from dataclasses import replace

from megatron_pp_ext.compiler.compile import InfeasibleLimit, least_makespan
from megatron_pp_ext.compiler.make import CostsOf, Made, Make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.compiler.search.problem import TOLERANCE
from megatron_pp_ext.features.offload.compiled import planned
from megatron_pp_ext.features.offload.free_plans import with_share, within, without_copies
from megatron_pp_ext.features.offload.longer_plans import with_whole_share, within_limits
from megatron_pp_ext.features.offload.options import Offload
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.names import AUTO, FLEX
from megatron_pp_ext.schedule.simulate import Timeline, simulate

HOST_LINK = 25e9
"""The bytes a second, each way, that are counted on where the machine is not known: those of PCIe 4 x16."""

PART_OF_FORWARD = 0.5
"""The part of a forward that a copy counts as where it is not known how many bytes a stage keeps."""

_FEWER = 8
"""The part of the trials that is left for an order without copies, which has to be shorter than one with."""

_WORTH_SAYING = 5e-4
"""The part of a step from which on it is reported that copies make it longer."""


def offloaded(request: Request, option: Offload, costs: CostsOf, before: Make) -> Made:
    """Let activations wait on the host, as the ``option`` of the request asks.

    ValueError, in one line, where no copies keep the memory limit.
    """
    if option.share == AUTO and request.is_compiled:
        return _compiled(request, costs, before)
    made = before(request)
    known = with_copy_seconds(_known(request, costs, made.schedule))
    alone = without_copies(made.schedule, known)
    timeline = _timeline(made.schedule, request, option.share, known)
    growth = timeline.makespan / alone.makespan - 1
    note = f"copies to the host make steps {growth:.1%} longer by the estimate"
    notes = "; ".join(filter(None, (made.note, note if growth > _WORTH_SAYING else "")))
    return replace(made, schedule=timeline.schedule, note=notes)


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


def _known(request: Request, costs: CostsOf, schedule: Schedule) -> Costs:
    """Return the costs of the stages of ``schedule``; those of units for a model that has no estimate."""
    placement = schedule.placement
    try:
        return costs(request.finest.stages, placement.splits_head).merged(placement.stages)
    except ValueError:
        return Costs.unit(placement)


def _timeline(schedule: Schedule, request: Request, share: float | str, costs: Costs) -> Timeline:
    if share != AUTO:
        return with_whole_share(schedule, costs, float(share))
    if request.limit is None:
        return with_share(schedule, costs, 1.0)
    budget = request.budget(costs)
    timeline = within_limits(schedule, budget.counted(costs), budget.ranks)
    if timeline is not None:
        return timeline
    peaks = within(schedule, budget.counted(costs), budget.ranks).peak_memory
    rank = max(range(request.ranks), key=lambda rank: peaks[rank] - budget.ranks[rank])
    raise InfeasibleLimit(
        f"memory limit: rank {{rank}} may keep {budget.ranks[rank]:.4g}, but keeps {peaks[rank]:.4g} "
        f"under {schedule.name} with all on the host that comes back in time; raise it, or choose flex",
        rank,
    )


def _compiled(request: Request, costs: CostsOf, before: Make) -> Made:
    """Return the shortest step found within the limit where activations may wait on the host.

    What is compiled without copies stays if nothing is shorter.  Where a published family keeps the limit
    with them, fewer trials search for it, and none where its lower bound is above that family's step.
    """
    known = with_copy_seconds(costs(request.finest.stages, bool(request.splits_head)))
    budget = request.budget(known)
    counted = budget.counted(known)
    found = planned(request.placements, request.microbatches, counted, budget.ranks)
    trials = request.trials if found is None else request.trials // _FEWER
    if found is None:
        return Made(before(replace(request, trials=trials)).schedule)
    made = Made(replace(found.schedule, name=FLEX))
    least = least_makespan(request.placements, request.microbatches, counted, budget.ranks)
    if least > found.makespan * (1 + TOLERANCE):
        return made
    with suppress(InfeasibleLimit):
        alone = before(replace(request, trials=trials))
        stages = alone.schedule.placement.stages
        if simulate(alone.schedule, counted.merged(stages)).makespan <= found.makespan:
            return Made(alone.schedule)
    return made
