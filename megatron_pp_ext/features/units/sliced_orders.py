"""Orders of equal slices: families that keep their shape (Seq1F1B, arXiv 2406.03488), and list schedules."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_pp_ext.compiler.limits import InfeasibleLimit, at_most, without_messages
from megatron_pp_ext.compiler.make import Made, Make, make
from megatron_pp_ext.compiler.request import Request, of_sizes
from megatron_pp_ext.features.units.options import Slices
from megatron_pp_ext.features.units.units import Units, more, require_chain_order, shifted
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.entry import FORWARD_ONLY
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import Timeline, simulate

LISTED = "list scheduling"
"""The origin of an order that is no family's."""

_BUDGET = 0.2
"""The seconds of a core that a search may take, which is for all steps."""

_TRIES = 4
"""How often less is left for activations, where messages need more than the least."""


def sliced(request: Request, option: Slices, costs: CostModel, before: Make) -> Made:
    """Let the units of the order be slices, as the ``option`` of the request asks.

    The ``costs`` are those of whole microbatches.  ValueError for what slices do not go with, for a schedule
    from a file that takes slices in another order, and where no limit can be kept.
    """
    units = option.units(request.microbatches)
    if request.schedule == FORWARD_ONLY:
        result = before(replace(request, microbatches=len(units)))
        return replace(result, schedule=replace(result.schedule, units=units.names))
    if request.is_compiled:
        return _planned(request, units, option.count, costs)
    if request.from_file is not None:
        result = before(replace(request, microbatches=len(units)))
        require_chain_order(result.schedule, units)
        return replace(result, schedule=replace(result.schedule, units=units.names))
    result = before(replace(request, microbatches=len(units) + more(units)))
    return replace(result, schedule=shifted(result.schedule, units))


def _planned(request: Request, units: Units, slices: int, costs: CostModel) -> Made:
    """Return the shortest order for the request's limit that is found with any of its placements."""
    if request.splits_head:
        raise ValueError(f"slices under {request.schedule} leave the head whole: leave one of the two out")
    finest = costs.of(request.finest)
    budget = request.budget(finest)
    of_slices = of_equal_slices(budget.counted(finest), slices)
    plans, refused = list[tuple[Timeline, str, float]](), list[InfeasibleLimit]()
    for placement in request.placements:
        try:
            plans.append(compiled(units, placement, of_slices.merged(placement.stages), budget.ranks))
        except InfeasibleLimit as error:
            refused.append(error)
    if not plans:
        raise refused[0]
    timeline, origin, _ = min(plans, key=lambda plan: plan[0].makespan)
    schedule = replace(timeline.schedule, name=request.schedule)
    least = min(timeline.makespan, *(bound for *_, bound in plans))
    return Made(schedule, lower_bound=least, origin=f"{origin}, {schedule.placement.shape} placement")


def compiled(
    units: Units, placement: Placement, costs: Costs, limits: Sequence[float]
) -> tuple[Timeline, str, float]:
    """Return the shortest step of ``units``, which all have these ``costs``, its origin and a lower bound.

    It is no longer than that of any family with this placement that keeps the ``limits``, which hold
    activations and ``Costs.message`` for each message.  InfeasibleLimit where no order is found.
    """
    best, bound = _listed(units, placement, costs, limits)
    origin = LISTED
    for name, timeline in _families(units, placement, costs):
        if timeline.makespan < best.makespan and _keeps(timeline, limits):
            best, origin = timeline, name
    return best, origin, bound


def _listed(
    units: Units, placement: Placement, costs: Costs, limits: Sequence[float]
) -> tuple[Timeline, float]:
    """Return the step by list scheduling, and the lower bound."""
    # Imported here because it takes numpy, which nobody needs who has no such schedule.
    from megatron_pp_ext.features.units.plan import listed
    from megatron_pp_ext.features.units.table import table_of

    charged = replace(costs, stages=tuple(stage.charged_to_forward for stage in costs.stages))
    table = table_of(charged, len(units))
    rooms = without_messages(placement, len(units), costs, limits)
    for _ in range(_TRIES):
        plan = listed(units, table, placement, rooms, _BUDGET)
        timeline = simulate(plan.schedule, costs)
        if _keeps(timeline, limits):
            return timeline, plan.lower_bound
        over = zip(rooms, timeline.peak_memory, limits, strict=True)
        rooms = tuple(room - max(0.0, peak - limit) for room, peak, limit in over)
    raise InfeasibleLimit(
        f"no order of slices is found whose activations and messages keep the memory limit {max(limits):g}: "
        "raise it"
    )


def _families(units: Units, placement: Placement, costs: Costs) -> Iterator[tuple[str, Timeline]]:
    for name, entry in catalog.ENTRIES.items():
        if not entry.accepts(placement.chunks):
            continue
        if entry.placement(placement.ranks, placement.chunks) == placement:
            count = len(units) + more(units)
            whole = make(of_sizes(name, placement.ranks, count, placement.chunks), is_proved=True).schedule
            yield name, simulate(shifted(whole, units), costs)


def _keeps(timeline: Timeline, limits: Sequence[float]) -> bool:
    return all(map(at_most, timeline.peak_memory, limits))


def of_equal_slices(costs: Costs, slices: int) -> Costs:
    """Return the costs of a unit where all have the same, one of so many ``slices`` of a microbatch.

    Each takes and keeps its part of a microbatch's ``costs``; weights stay what they are.
    """
    stages = tuple(
        replace(
            stage,
            forward=stage.forward / slices,
            input_gradient=stage.input_gradient / slices,
            weight_gradient=stage.weight_gradient / slices,
            activation=stage.activation / slices,
            released_by_input_gradient=stage.released_by_input_gradient / slices,
            copy=stage.copy / slices,
            hidden=stage.hidden / slices,
            workspace=stage.workspace / slices,
            workspace_in_whole=stage.workspace_in_whole / slices,
        )
        for stage in costs.stages
    )
    shared = costs.head
    if shared is not None:
        shared = replace(
            shared,
            scores=shared.scores / slices,
            weight_gradient=shared.weight_gradient / slices,
            activation=shared.activation / slices,
            hidden=shared.hidden / slices,
            sums=shared.sums / slices,
        )
    return replace(costs, stages=stages, hop=costs.hop / slices, message=costs.message / slices, head=shared)
