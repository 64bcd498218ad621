"""The shortest order of equal slices that is found within a memory limit."""

from collections.abc import Iterator, Sequence

from megatron_pp_ext.compiler.compile import InfeasibleLimit
from megatron_pp_ext.compiler.limits import at_most, without_messages
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import of_sizes
from megatron_pp_ext.features.slices.search import Search
from megatron_pp_ext.features.slices.shift import more, shifted
from megatron_pp_ext.features.slices.slice_costs import equal_work
from megatron_pp_ext.features.slices.units import Units
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import Timeline, simulate

LISTED = "list scheduling"
"""The origin of an order that is no family's."""

_BUDGET = 0.2
"""The seconds of a core that a search may take, which is for all steps."""

_TRIES = 4
"""How often less is left for activations, where messages need more than the least."""


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
    work = equal_work(units, costs, placement)
    rooms = without_messages(placement, len(units), costs, limits)
    for _ in range(_TRIES):
        plan = Search(units, work, placement, rooms).planned(_BUDGET)
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
