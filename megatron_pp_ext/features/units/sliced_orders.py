"""Orders of equal slices: families keep their shape (Seq1F1B, arXiv 2406.03488); what a search would find is
listed.

A schedule for microbatches does the backward of microbatch j no earlier than its forward.  Of a sequence in k
slices the last one's backward comes first, k - 1 forwards later than its first slice's could.  So the family
makes an order for k - 1 microbatches more than there are units.  Its first k - 1 backwards are left out, as
are its last k - 1 forwards, and backward number j + k - 1 is the jth in the units' own order.  An action then
waits only for actions that it also waited for before, so ranks cannot come to wait for each other.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_pp_ext.compiler.limits import InfeasibleLimit, at_most, without_messages
from megatron_pp_ext.compiler.make import Made, Make, make
from megatron_pp_ext.compiler.request import Request, of_sizes
from megatron_pp_ext.features.units.options import Slices
from megatron_pp_ext.features.units.units import Units
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule, together
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.entry import FORWARD_ONLY
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import Timeline, simulate

_FORWARDS = Kind.F, Kind.S


def more(units: Units) -> int:
    """Return how many forwards the first backward of a unit waits for, besides that of the first unit."""
    return max(map(len, units.chains)) - 1


def shifted(schedule: Schedule, units: Units) -> Schedule:
    """Return ``schedule``, which is for ``len(units) + more(units)`` microbatches or more, for ``units``.

    ValueError for schedules with copies to the host, which are planned for microbatches.
    """
    if schedule.copies:
        raise ValueError("activations of slices are not copied to the host: leave one of the two out")
    count, delay, backwards = len(units), more(units), units.backwards
    paired: set[Action] = set()

    def kept(order: Iterable[Action]) -> Iterator[Action]:
        for actions in together(tuple(order), schedule.paired):
            found = list[Action]()
            for action in actions:
                if action.kind in _FORWARDS:
                    if action.microbatch < count:
                        found.append(action)
                elif delay <= action.microbatch < count + delay:
                    found.append(action._replace(microbatch=backwards[action.microbatch - delay]))
            if len(found) > 1:
                paired.add(found[0])
            yield from found

    orders = tuple(tuple(kept(order)) for order in schedule.orders)
    return replace(schedule, microbatches=count, orders=orders, paired=frozenset(paired), units=units.names)


def require_chain_order(schedule: Schedule, units: Units) -> None:
    """Raise ValueError unless every stage takes slices forward in their order, and back in reverse."""
    if schedule.microbatches != len(units):
        raise ValueError(
            f"the schedule is for {schedule.microbatches} units, but there are {len(units)}: "
            "make it for as many"
        )
    latest: dict[tuple[int, bool, int], int] = {}
    for action in schedule:
        stage, kind, unit = action
        if kind not in (Kind.F, Kind.I, Kind.B):
            continue
        is_forward, chain = kind is Kind.F, units.chain_of[unit]
        before = unit - 1 if is_forward else unit + 1
        if before in chain and latest.get((stage, is_forward, chain[0])) != before:
            raise ValueError(
                f"{action} comes before that of slice {units.units[before].slice} of its sequence: slices go "
                "forward in their order and back in reverse"
            )
        latest[stage, is_forward, chain[0]] = unit


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
    """Yield the step of every family with this placement."""
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

    Each takes and keeps its part of what ``costs`` say of a microbatch; weights stay what they are.
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
