"""Steps in slices: one planner, which training, estimates, searches and commands take.

It plans a step from the lengths of its microbatches.  Without an order these are the model's sequence length,
so that one plan does for all steps with as many microbatches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import inf

from megatron_pp_ext.compiler.limits import (
    LARGEST_FRACTION,
    Budget,
    InfeasibleLimit,
    at_most,
    least_messages,
    without_messages,
)
from megatron_pp_ext.compiler.make import Made, Make, make
from megatron_pp_ext.compiler.request import Request, of_sizes
from megatron_pp_ext.features.units.list_scheduling import ROUNDING
from megatron_pp_ext.features.units.options import (
    NOMINAL,
    SMALLEST,
    Ordering,
    Slices,
    Unchecked,
    are_by_length,
)
from megatron_pp_ext.features.units.orders import How
from megatron_pp_ext.features.units.plan import BUDGET, Plan, Planner
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.features.units.units import Units, named_units, require_chain_order, whole
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.entry import FORWARD_ONLY
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import peak_messages

LENGTH = 4096
"""The length at which costs by length are asked for, and half of it: any two lengths give a line."""

_CACHED = 32
"""The schedules of a family that are kept for later steps with as many units."""

_BUDGET = 0.2
"""The seconds of a core that a search may take for a plan that all steps have."""

_TRIES = 4
"""How often less is left for activations, where messages need more than the least."""


class SlicePlanner:
    """Plans steps of ``request`` with ``planner``, whose placement they have.

    A family states the placement and the memory: the plan is the shorter of the family's order (``shifted``)
    and one by list scheduling within what that order keeps on each rank.  ``flex`` and ``auto`` have list
    scheduling within their limit, or a family's order that keeps it and is shorter.  A fraction as limit
    ``is_raised`` to what the longest sequence needs, where lengths are not known before the run.
    """

    def __init__(
        self,
        request: Request,
        planner: Planner,
        of_family: Callable[[int], Schedule] | None = None,
        is_raised: bool = False,
    ) -> None:
        self.request, self.planner, self._is_raised = request, planner, is_raised
        self._of_family = lru_cache(maxsize=_CACHED)(of_family or self._make)

    def plan(
        self, units: Units, how: How = "search", whole: Units | None = None, budget: float = BUDGET
    ) -> Plan:
        """Return the plan of a step of ``units``, which are those of ``whole`` microbatches.

        InfeasibleLimit where no order is found that keeps the limit.
        """
        planner = self.planner
        if not self.request.is_compiled:
            return planner.within_family(self._of_family, units, how, budget)
        limits = self.limits(units, whole)
        units = planner.finer(units, limits)
        plan = self._within(units, how, limits, budget)
        if units.are_alike:
            for family in self._families():
                other = planner.in_family(family, units)
                if other.seconds < plan.seconds and all(map(at_most, planner.peaks(other), limits)):
                    plan = replace(other, lower_bound=plan.lower_bound)
        return plan

    def limits(self, units: Units, whole: Units | None = None) -> tuple[float, ...]:
        """Return each rank's limit on the activations of ``units``; see ``limits_of``."""
        return limits_of(self.request, self.planner, units, whole, self._is_raised)

    def chosen(self, documents: Sequence[Sequence[int]], whole: Units | None = None) -> int:
        """Return the tokens of a unit with which a step of these ``documents`` is shortest."""
        planner = self.planner
        if not self.request.is_compiled:
            return planner.chosen_in_family(self._of_family, documents)
        return planner.chosen_tokens(documents, self.limits(planner.cut(documents, SMALLEST), whole))

    def _within(self, units: Units, how: How, limits: Sequence[float], budget: float) -> Plan:
        """Return the plan by list scheduling within ``limits``, which leave the least for messages.

        Where it needs more for them, less is left for activations.
        """
        planner, within = self.planner, tuple(limits)
        plan = planner.plan(units, how, limits=within, budget=budget)
        message = planner.costs(units).message if _holds_messages(self.request) else 0.0
        least = [least_messages(planner.placement, rank, len(units)) for rank in range(self.request.ranks)]
        for _ in range(_TRIES if message else 0):
            peaks, messages = planner.peaks(plan), peak_messages(plan.schedule)
            more = [message * (count - few) for count, few in zip(messages, least, strict=True)]
            over = [peak + extra - limit for peak, extra, limit in zip(peaks, more, limits, strict=True)]
            if max(over) <= ROUNDING * max(limits):
                return plan
            within = tuple(limit - max(0.0, extra) for limit, extra in zip(within, over, strict=True))
            plan = planner.plan(units, how, limits=within, budget=budget)
        if message and not catalog.abilities(self.request.schedule).measures_memory:
            raise InfeasibleLimit(
                f"no order of slices is found whose activations and messages keep the memory limit "
                f"{self.request.limit}: raise it"
            )
        return plan

    def _families(self) -> Iterator[Callable[[int], Schedule]]:
        """Yield the families with this placement, as functions of the number of microbatches."""
        placement = self.planner.placement
        for name, entry in catalog.ENTRIES.items():
            if entry.accepts(placement.chunks):
                first = entry.placement(placement.ranks, placement.chunks)
                if placement in (first, first.turned_over if first.folds else first):
                    yield partial(_of_family, name, placement)

    def _make(self, count: int) -> Schedule:
        return make(replace(self.request, microbatches=count), is_proved=True).schedule


@lru_cache(maxsize=_CACHED)
def _of_family(name: str, placement: Placement, count: int) -> Schedule:
    request = of_sizes(name, placement.ranks, count, placement.chunks)
    return make(replace(request, placements=(placement,)), is_proved=True).schedule


def limits_of(
    request: Request,
    planner: Planner,
    units: Units,
    whole: Units | None = None,
    is_raised: bool = True,
) -> tuple[float, ...]:
    """Return each rank's limit on activations in a step of ``units``, of the ``whole`` microbatches.

    A fraction is one of what 1F1B keeps of these.  Where it ``is_raised``, and under ``auto``, what the
    longest sequence or the largest pack needs is permitted: no run is to end for one that is larger than
    others.  An amount stays, and has the least messages too.
    """
    costs = planner.rates.of(whole or units)
    budget = replace(request, microbatches=len(costs.units), ordinary=None).budget(costs)
    limits = budget.ranks
    if budget.holds_messages:
        limits = without_messages(planner.placement, len(units), planner.rates.of(units), limits)
        if not catalog.abilities(request.schedule).measures_memory:
            return limits
    elif not is_raised:
        return limits
    return tuple(map(max, limits, planner.least_limits(units)))


def _holds_messages(request: Request) -> bool:
    """Whether the limit of ``request`` is an amount, which holds messages too."""
    limit = request.limit
    if isinstance(limit, Budget):
        return limit.holds_messages
    numbers = limit if isinstance(limit, tuple) else (limit or inf,)
    return max(numbers) > LARGEST_FRACTION


def without_units(request: Request) -> Request:
    """Return ``request`` for whole microbatches in the order of the data."""
    options = (option for option in request.options if not isinstance(option, Ordering | Slices | Unchecked))
    return replace(request, options=tuple(options))


def sliced(
    request: Request, option: Slices, costs: CostModel, before: Make, budget: float | None = None
) -> Made:
    """Let the units of the order be slices, as the ``option`` of the request asks.

    A search takes ``budget`` seconds of a core at most, as many as in training where each step is planned.
    The ``costs`` are those of whole microbatches.  ValueError for what slices do not go with, for a schedule
    from a file that takes slices in another order, and where no limit can be kept.
    """
    if request.schedule == FORWARD_ONLY and are_by_length(request):
        return before(request)  # each is planned by itself, or whole where lengths are not known
    if request.is_compiled and request.splits_head:
        raise ValueError(f"slices under {request.schedule} leave the head whole: leave one of the two out")
    option = _known(option)
    if budget is None:
        budget = BUDGET if are_by_length(request) else _BUDGET
    plain, results, refused = without_units(request), list[tuple[Planner, Plan]](), list[InfeasibleLimit]()
    for placement in request.placements:
        planner = planner_of(option, costs, placement, request.may_split_backward)

        def of_family(count: int) -> Schedule:
            return before(replace(plain, microbatches=count)).schedule

        steps = SlicePlanner(
            replace(plain, placements=(placement,)), planner, of_family, are_by_length(request)
        )
        documents = [[option.length]] * request.microbatches
        try:
            units = planner.cut(documents, option.tokens or steps.chosen(documents, whole(documents)))
            if request.schedule == FORWARD_ONLY or request.from_file is not None:
                return _as_it_is(of_family(len(units)), units)
            plan = steps.plan(units, whole=whole(documents), budget=budget)
        except InfeasibleLimit as error:
            refused.append(error)
        else:
            results.append((planner, plan))
    if not results:
        raise refused[0]
    planner, plan = min(results, key=lambda result: result[1].seconds)
    # All microbatches are alike: they may have the numbers in which they run.
    schedule = replace(planner.timed(plan).schedule, name=request.schedule, units=plan.cut.names)
    least = min(other.lower_bound for _, other in results)
    origin = f"{plan.origin}, {schedule.placement.shape} placement"
    return Made(schedule, lower_bound=least if request.is_compiled else None, origin=origin)


def _known(option: Slices) -> Slices:
    """Return ``option`` with sequences of a length, of a few equal slices where it is not known."""
    if option.length:
        return option
    return replace(option, tokens=1, length=NOMINAL, multiple=1, overhead=0.0, equal_at=inf)


def costs_in_units(request: Request, costs: CostModel, schedule: Schedule) -> Costs:
    """Return the costs of the actions of ``schedule``, where ``costs`` are those of whole microbatches."""
    option = request.option(Slices)
    if option is None or not schedule.units:
        return costs.of(schedule.placement)
    known = _known(option)
    rates = rates_of(known, costs, schedule.placement)
    return rates.of(named_units(schedule.units, known.rows), known.overhead)


def _as_it_is(schedule: Schedule, units: Units) -> Made:
    """Return the schedule of an evaluation, or of a file, for ``units``."""
    if schedule.name != FORWARD_ONLY:
        require_chain_order(schedule, units)
    return Made(replace(schedule, units=units.names))


def planner_of(option: Slices, costs: CostModel, placement: Placement, splits_backward: bool) -> Planner:
    """Return the planner of steps whose sequences are cut as ``option`` says, by the model's ``costs``."""
    return Planner(
        placement,
        rates_of(option, costs, placement),
        splits_backward=splits_backward,
        overhead=option.overhead,
        multiple=option.multiple,
        rows=option.rows,
    )


def rates_of(option: Slices, costs: CostModel, placement: Placement) -> LengthCosts:
    """Return the costs of the stages of ``placement`` by length.

    They follow from the costs at two lengths; where these are of one length, attention has the part that
    ``option`` states, and where there are none, all stages are alike.
    """
    if option.rates is not None:
        return option.rates
    tokens = option.rows * option.length
    try:
        halves, longer = (costs.at(LENGTH // count, count).of(placement) for count in (2, 1))
    except ValueError:
        try:
            alike = costs.of(placement)
        except (TypeError, ValueError):  # any model may train, and an evaluation has no costs
            alike = Costs.unit(placement)
        return LengthCosts.measured(alike, option.length, option.rows, option.equal_at)
    rates = LengthCosts.through(halves, 2, longer, LENGTH)
    part = tokens / LENGTH
    return replace(rates, hop=rates.hop * part, message=rates.message * part)
