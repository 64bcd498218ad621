"""The pass: orders whose units are slices of sequences.

Families keep their shape (``shift``); what the compiler would search for is planned by list scheduling.
"""

from dataclasses import replace

from megatron_pp_ext.compiler.compile import InfeasibleLimit
from megatron_pp_ext.compiler.make import Made, Make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.slices.options import Slices
from megatron_pp_ext.features.slices.shift import more, require_chain_order, shifted
from megatron_pp_ext.features.slices.units import Units
from megatron_pp_ext.schedule.costs import CostModel
from megatron_pp_ext.schedule.names import FORWARD_ONLY
from megatron_pp_ext.schedule.simulate import Timeline


def sliced(request: Request, costs: CostModel, before: Make) -> Made:
    """Let the units of the order be slices, where any are requested.

    The ``costs`` are those of whole microbatches.  ValueError for what slices do not go with, for a schedule
    from a file that takes slices in another order, and where no limit can be kept.
    """
    option = request.option(Slices)
    if option is None or option.count == 1:
        return before(request)
    units = option.units(request.microbatches)
    if request.schedule == FORWARD_ONLY:
        made = before(replace(request, microbatches=len(units)))
        return replace(made, schedule=replace(made.schedule, units=units.names))
    if request.is_compiled:
        return _planned(request, units, option.count, costs)
    if request.from_file is not None:
        made = before(replace(request, microbatches=len(units)))
        require_chain_order(made.schedule, units)
        return replace(made, schedule=replace(made.schedule, units=units.names))
    made = before(replace(request, microbatches=len(units) + more(units)))
    return replace(made, schedule=shifted(made.schedule, units))


def _planned(request: Request, units: Units, slices: int, costs: CostModel) -> Made:
    """Return the shortest order for the request's limit that is found with any of its placements."""
    # Imported here because it takes numpy, which nobody needs who has no such schedule.
    from megatron_pp_ext.features.slices.compiled import compiled
    from megatron_pp_ext.features.slices.slice_costs import of_equal_slices

    if request.splits_head:
        raise ValueError(f"slices under {request.schedule} leave the head whole: leave one of the two out")
    finest = costs.of(request.finest)
    budget = request.budget(finest)
    of_slices = of_equal_slices(budget.counted(finest), slices)
    found, refused = list[tuple[Timeline, str, float]](), list[InfeasibleLimit]()
    for placement in request.placements:
        try:
            found.append(compiled(units, placement, of_slices.merged(placement.stages), budget.ranks))
        except InfeasibleLimit as error:
            refused.append(error)
    if not found:
        raise refused[0]
    timeline, origin, _ = min(found, key=lambda one: one[0].makespan)
    schedule = replace(timeline.schedule, name=request.schedule)
    least = min(timeline.makespan, *(bound for *_, bound in found))
    return Made(schedule, lower_bound=least, origin=f"{origin}, {schedule.placement.shape} placement")
