"""The plan of a step whose units differ: how sequences are cut, the order of units, and that of all actions.

What limits a search is a number of trials and never a clock, so that all ranks find the same plan.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import get_args

import numpy as np

from megatron_pp_ext.compiler.limits import InfeasibleLimit
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import LARGEST as LARGEST_PLAN
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.units import orders
from megatron_pp_ext.features.units.climb import Changes, Climb, Timing, climbed
from megatron_pp_ext.features.units.fixed_order import FixedOrder, no_fixed
from megatron_pp_ext.features.units.list_scheduling import (
    ROUNDING,
    Listing,
    ListRules,
    bounded,
    free_rules,
    listing_of,
    lower_bound,
    orders_of,
    rules_of,
)
from megatron_pp_ext.features.units.microbatches import Microbatches, require_number, whole_number
from megatron_pp_ext.features.units.options import SMALLEST
from megatron_pp_ext.features.units.orders import How, Order
from megatron_pp_ext.features.units.rates import OVERHEAD, LengthCosts
from megatron_pp_ext.features.units.table import Floats, Table, table_by_length
from megatron_pp_ext.features.units.units import By, Heaviest, Units, cut, more, ordered, shifted, whole
from megatron_pp_ext.schedule.actions import Kind, Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs, UnitCosts
from megatron_pp_ext.schedule.loops import without_collection
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.program import KINDS, F

BUDGET = 0.05
"""The seconds of one core that a plan may take by default."""

LONGEST_BUDGET = 600.0
"""The most seconds of a core that a plan may be given."""

_MOST_TRIALS = 1_000_000
"""The most trials of a search: their random numbers are drawn before."""

STEPS_PER_SECOND = 130e6
"""How many steps of a schedule one core times in a second, at least."""

_STEPS_OF_A_TRIAL = 40
"""The steps in whose time a trial's order is changed, whatever the schedule."""

_STARTS = 3
"""How many of the orders that are known a search under a schedule starts from."""

_WARMTH = 0.003
"""The part of a step by which a change may make it longer at first, under a schedule."""

_PATIENCE = (1.0, 0.75, 0.5, 0.25, 0.0)
"""How long holes for W may be, as parts of a W (``fixed_order.timed``)."""

ACTIONS_PER_SECOND = 5e6
"""How many actions one core lists in a second, at least."""

SECONDS_OF_AN_ACTION = 0.5e-6
"""The seconds of one core for what a plan makes of each action besides listing it."""

_PACES = 0.0, 0.3, 0.5, 0.2, 0.4
"""The paces at which chains enter, the best on average first."""

_NEAR = 1.0005
"""A step within this factor of the lower bound is not searched further."""

_AMPLE = 3
"""The units by rank of the pipeline of which a limit has to hold more, so that no smaller ones are tried."""

_WAITS = 1.02
"""The factor of the lower bound from which on smaller units are tried."""

_GAIN = 0.985
"""The factor by which a step has to be shorter in smaller units: the search shortens all by such a part."""

_OF_ORDER, _OF_ENTRY, _OF_GAPS = (0.25, 0.85, 1.0), (1 / 3, 2 / 3, 2 / 3), (0.0, 0.0, 0.0)
"""The kinds of changes (``climb.Changes``) under a schedule, by list scheduling, and of equal chains."""

NAME = "sliced"
"""The name of schedules that are planned for units."""

LARGEST = 65_536
"""The most tokens of a unit that ``auto`` tries, from ``SMALLEST`` on by factors of 2."""


@dataclass(frozen=True)
class Plan:
    """The plan of a step: chain ``order[k]`` of the ``cut`` is the k-th of ``schedule``.

    ``seconds`` is how long the pipeline takes by simulation, and ``lower_bound`` a time that no order of
    these units is below; 0 under a schedule whose order of actions is fixed.  ``origin`` says where the order
    of actions is from.
    """

    cut: Units
    order: tuple[int, ...]
    schedule: Schedule
    seconds: float
    lower_bound: float = 0.0
    origin: str = "list scheduling"

    @cached_property
    def units(self) -> Units:
        """The units in the order of the schedule."""
        return ordered(self.cut, self.order)


class Template:
    """A ``schedule`` whose order of actions plans follow, for chains of one unit.

    What does not depend on lengths is computed once.  Without ``moves_weights`` W stay where they are.
    """

    def __init__(self, schedule: Schedule, moves_weights: bool = True) -> None:
        self.schedule = schedule
        self.fixed = FixedOrder(schedule, moves_weights=False)
        self.movable = FixedOrder(schedule) if moves_weights else self.fixed

    @cached_property
    def rules(self) -> tuple[ListRules, ...]:
        """The rules by which list scheduling follows the schedule, and those of none; none where it cannot.

        Pairs and copies are planned for one order, and the parts of a split head have no place in another.
        """
        schedule = self.schedule
        if schedule.paired or schedule.copies or schedule.placement.splits_head:
            return ()
        rules = tuple(rules_of(schedule, reserves) for reserves in (False, True))
        kinds = {action.kind for action in schedule}
        if {Kind.B, Kind.I} <= kinds or Kind.F not in kinds:
            return rules
        return (*rules, free_rules(schedule.placement, Kind.B not in kinds))

    def require(self, units: Units, table: Table) -> None:
        """Raise ValueError for another number of units or stages than the schedule has."""
        if len(units) != self.schedule.microbatches:
            raise ValueError(
                f"there are costs of {len(units)} microbatches, but the schedule has "
                f"{self.schedule.microbatches}: give as many"
            )
        if table.seconds.shape[1] != self.schedule.placement.stages:
            raise ValueError(
                f"there are costs of {table.seconds.shape[1]} stages, but the schedule has "
                f"{self.schedule.placement.stages}: give one for each stage"
            )


class Planner:
    """Plans steps on ``placement`` whose stages have the costs of ``rates``.

    ``overhead`` are the tokens that a unit costs on top of its own.  Slices end at a ``multiple`` of so many
    tokens, which divides all lengths.  A token stands for one of each of the ``rows`` of a batch.
    """

    def __init__(
        self,
        placement: Placement,
        rates: LengthCosts,
        *,
        splits_backward: bool = True,
        overhead: float = 0.0,
        multiple: int = 1,
        rows: int = 1,
    ) -> None:
        if len(rates.stages) != placement.stages:
            raise ValueError(
                f"there are costs of {len(rates.stages)} stages, but the placement has {placement.stages}: "
                "give one for each"
            )
        require_number("overhead", overhead)
        self.placement, self.rates, self.splits_backward = placement, rates, splits_backward
        self.overhead = overhead
        self._multiple, self._rows = whole_number("multiple", multiple), whole_number("rows", rows)

    def whole(self, documents: Iterable[Sequence[int]]) -> Units:
        """Return a unit for each of the microbatches with these ``documents``."""
        return whole(documents)

    def cut(self, documents: Iterable[Sequence[int]], slice_tokens: int, by: By = "cost") -> Units:
        """Return the units of microbatches with these ``documents``, of at most ``slice_tokens`` each."""
        return cut(documents, slice_tokens, by, self.rates.equal_at, self._multiple, self._rows)

    def costs(self, units: Units) -> UnitCosts:
        """Return the costs of actions of ``units``, for ``simulate``."""
        return self.rates.of(units, self.overhead)

    def table(self, units: Units) -> Table:
        """Return the seconds and memory of ``units``."""
        return table_by_length(self.rates, units, self.overhead)

    def plan(
        self,
        units: Units,
        how: How = "search",
        *,
        template: Template | None = None,
        limits: Sequence[float] | None = None,
        budget: float = BUDGET,
    ) -> Plan:
        """Return the plan of a step of ``units``, in ``budget`` seconds of a core at most.

        With a ``template`` these are whole microbatches, which take its places (``in_template``).  Without
        one, list scheduling orders all actions (``listed``), by the rule in few trials.  ``limits`` are what
        each rank may keep, in the unit of ``StageRates.activation`` for a token.  Equal arguments give an
        equal plan on every machine.  InfeasibleLimit where no order is found that keeps the limits.
        ValueError for limits of another number of ranks, for numbers that are none, and for more actions than
        are simulated.
        """
        require_number("budget", budget, most=LONGEST_BUDGET)
        if how not in get_args(How):
            raise ValueError(f"how is {how!r:.40}: give 'given', 'rule' or 'search'")
        table = self.table(units)
        if template is not None:
            return in_template(template, units, table, how, limits=limits, budget=budget)
        bounds = self._no_limits if limits is None else limits
        spent = budget if how == "search" else 0.0
        return listed(units, table, self.placement, bounds, spent, self.splits_backward)

    def timed(self, plan: Plan) -> Plan:
        """Return ``plan`` with the times of its units, by which ranks launch; equal ones need none."""
        table = self.table(plan.cut)
        if table.is_of_alike:
            return plan
        numbers = [number for chain in plan.order for number in plan.cut.chains[chain]]
        return replace(plan, schedule=replace(plan.schedule, durations=table.durations(np.array(numbers))))

    def chosen_tokens(self, documents: Sequence[Sequence[int]], limits: Sequence[float]) -> int:
        """Return the size of units whose step is shortest where chains go light-heavy-light.

        Small units fill the pipeline sooner and keep less, and their ``overhead`` makes the step longer.
        Raises InfeasibleLimit where a rank cannot keep the longest document.
        """
        documents = Microbatches.of(documents).documents
        seconds, refused = dict[int, float](), list[InfeasibleLimit]()
        for size in _sizes(documents, self.placement.stages):
            units = self.cut(documents, size)
            search = _Listed(units, self.table(units), self.placement, limits, self.splits_backward)
            try:
                seconds[size] = search.climbed(len(_PACES))[0]
            except InfeasibleLimit as error:  # of a pack, or of the longest document
                refused.append(error)
        if not seconds:
            raise refused[0]
        return min(seconds, key=seconds.__getitem__)

    def finer(self, units: Units, limits: Sequence[float]) -> Units:
        """Return ``units``, or smaller ones of the same documents where with these ranks wait for memory.

        To be busy all the time a rank of p has to keep about p / 2 units, and more of unlike ones, whatever
        the order.  So where the ``limits`` hold no more than 3 p, units of half as many tokens are tried for
        as long as the step gets shorter, each with an overhead of ``OVERHEAD`` tokens or more.  Of a long
        step a part of the microbatches is tried.  ``units`` are those of ``cut``; the heaviest ones of
        several pipelines stay as they are.
        """
        ranks, largest = self.placement.ranks, max(units.tokens) // self._rows
        stages = [self.placement.stages_of(rank) for rank in range(ranks)]
        of_largest = self.table(units).kept[F].max(axis=1)[np.array(stages)].sum(axis=1)
        if isinstance(units, Heaviest) or all(bounded(limits, self.placement) > _AMPLE * ranks * of_largest):
            return units
        documents = units.documents[:: max(1, units.microbatches // (_AMPLE * ranks))]
        trial = copy(self)
        trial.overhead = max(self.overhead, OVERHEAD)
        shortest, chosen, size = math.inf, largest, largest
        while size >= max(SMALLEST, self._multiple):
            some = trial.cut(documents, size)
            search = _Listed(some, trial.table(some), self.placement, limits, self.splits_backward)
            seconds = search.climbed(len(_PACES))[0] if search.is_feasible else math.inf
            if seconds < _GAIN * shortest:
                shortest, chosen = seconds, size
            elif shortest < math.inf:
                break
            if seconds <= _WAITS * search.lower_bound:
                break
            size //= 2
        return units if chosen == largest else self.cut(units.documents, chosen)

    def least_limits(self, units: Units) -> list[float]:
        """Return the least that each rank may keep: the longest document, or the largest pack."""
        rules = free_rules(self.placement, self.splits_backward)
        listing = listing_of(units, self.table(units), self.placement, self._no_limits, rules)
        least: list[float] = (listing.ranks.least * (1 + ROUNDING)).tolist()
        return least

    def in_family(self, make: Callable[[int], Schedule], units: Units) -> Plan:
        """Return the plan whose actions have the order of a family (``shift``).

        ``make`` makes the family's schedule for so many microbatches.  Chains are light-heavy-light.
        """
        work = _work_of_chains(units, self.table(units))
        order = orders.light_heavy_light(work) if len(set(work)) > 1 else list(range(len(work)))
        planned, schedule = ordered(units, order), make(len(units) + more(units))
        moved = shifted(schedule, planned)
        places = np.arange(len(units))
        seconds, _ = FixedOrder(moved, moves_weights=False).timed(places, self.table(planned))
        return Plan(units, tuple(order), moved, seconds, origin=schedule.name)

    def within_family(
        self, make: Callable[[int], Schedule], units: Units, how: How = "search", budget: float = BUDGET
    ) -> Plan:
        """Return the shorter of ``in_family``, and list scheduling that keeps no more on any rank.

        What is planned in pairs, and the parts of a split head, have no place in another order.
        """
        family = self.in_family(make, units)
        if family.schedule.paired or family.schedule.placement.splits_head:
            table = self.table(units)
            search = _Listed(units, table, self.placement, self._no_limits, self.splits_backward)
            return replace(family, lower_bound=min(search.lower_bound, family.seconds))
        try:
            listed = self.plan(units, how, limits=self.peaks(family), budget=budget)
        except InfeasibleLimit:
            return family  # list scheduling holds free what a chain may need at one time, the order less
        best = min(family, listed, key=lambda plan: plan.seconds)
        return replace(best, lower_bound=min(listed.lower_bound, best.seconds))

    def peaks(self, plan: Plan) -> list[float]:
        """Return the most memory that each rank takes in ``plan``, as ``StageRates.activation`` counts it."""
        table, peaks = self.table(plan.units), list[float]()
        for order in plan.schedule.orders:
            actions = tuple(np.array([(KINDS.index(kind), stage, unit) for stage, kind, unit in order]).T)
            kept = table.kept[actions]
            peaks.append(float((kept.cumsum() - kept + table.taken[actions]).max()) * (1 + ROUNDING))
        return peaks

    def in_given_order(self, make: Callable[[int], Schedule], units: Units) -> Plan:
        """Return the plan of the forwards of ``units`` in their order.

        ``make`` makes the schedule of an evaluation of so many microbatches.
        """
        schedule = replace(make(len(units)), units=units.names)
        return Plan(units, tuple(range(len(units.chains))), schedule, math.nan)

    def chosen_in_family(self, make: Callable[[int], Schedule], documents: Sequence[Sequence[int]]) -> int:
        """Return the size of units whose step is shortest under a family; see ``within_family``."""
        return min(
            _sizes(documents),
            key=lambda size: self.within_family(make, self.cut(documents, size), "rule").seconds,
        )

    @property
    def _no_limits(self) -> list[float]:
        return [math.inf] * self.placement.ranks


def plan(
    lengths: Sequence[Sequence[int]],
    request: Request,
    costs: LengthCosts,
    budget: float = BUDGET,
    how: How = "search",
) -> Plan:
    """Return the order of the microbatches of a step, and its schedule.

    ``lengths[i]`` are the document lengths of microbatch i in tokens, and ``costs`` those of the stages of
    ``request.finest``.  A memory limit of the request holds in this step: as a fraction, it is one of what
    1F1B keeps of these microbatches in the order given.  The schedule of ``request`` is made anew; for many
    steps keep a ``Template`` of it.  Raises what ``make`` and ``Planner.plan`` raise.
    """
    units = whole(Microbatches.of(lengths).documents)
    in_step = costs.of(units)
    mean = Costs(in_step.stages, in_step.hop, in_step.message, in_step.head, in_step.pair)
    template = Template(make(request, CostModel.fixed(mean)).schedule)
    placement = template.schedule.placement
    limits = None if request.limit is None else request.budget(in_step).ranks
    planner = Planner(placement, costs.merged(placement.stages))
    return planner.plan(units, how, template=template, limits=limits, budget=budget)


def in_template(
    template: Template,
    units: Units,
    table: Table,
    how: How = "search",
    *,
    limits: Sequence[float] | None = None,
    budget: float = BUDGET,
) -> Plan:
    """Return the plan of whole microbatches in the places of ``template``, and with W where it is shortest.

    An order by the rule that does not keep the ``limits`` is searched for instead, and where none is found,
    F, I and W too get other orders than the schedule's.  One that is given is left alone.  Raises ValueError
    for another number of microbatches or stages than the schedule has, and InfeasibleLimit where no order is
    found that keeps the limits.
    """
    template.require(units, table)
    bounds = np.zeros(0) if limits is None else bounded(limits, template.schedule.placement)
    step = _InTemplate(template, units, table, bounds)
    as_given = list(range(len(units)))
    if how == "given" or table.is_of_alike:
        return step.plan(as_given, moves_weights=how != "given")
    rule = step.by_rule()
    if how == "rule" and not step.excess(rule):
        return step.plan(rule)
    elsewhere = [other(step.work, units.tokens) for other in orders.ELSEWHERE.values()]
    starts = list(map(list, dict.fromkeys(map(tuple, (rule, as_given, *elsewhere)))))
    candidates = [*step.searched(starts, budget), *starts]
    best = min(candidates, key=step.judged)
    return step.listed(candidates) if step.excess(best) else step.plan(best)


def in_order(template: Template, units: Units, table: Table, order: Sequence[int]) -> Plan:
    """Return the plan with this ``order`` of whole microbatches, under the schedule as it is."""
    template.require(units, table)
    return _InTemplate(template, units, table, np.zeros(0)).plan(list(order), moves_weights=False)


class _InTemplate:
    """A step of whole microbatches in the places of a schedule."""

    def __init__(self, template: Template, units: Units, table: Table, limits: Floats) -> None:
        self._template, self._units, self._table, self._limits = template, units, table, limits
        self._placement = template.schedule.placement
        self.work: list[float] = table.work.tolist()

    def by_rule(self) -> Order:
        some = orders.by_rule(self.work, self._placement)
        return min(some, key=lambda order: self._best_weights(order)[0]) if some[1:] else some[0]

    def searched(self, orders: Sequence[Order], budget: float) -> list[Order]:
        movable, table, limits = self._template.movable, self._table.by_row, self._limits
        steps, memory, *_ = movable.fixed
        actions = len(steps.before) + len(steps.weights.row) + len(memory.slot) * bool(len(limits))
        trials = int(budget * STEPS_PER_SECOND / (_STARTS * (actions + _STEPS_OF_A_TRIAL)))
        trials = min(trials, _MOST_TRIALS)
        rules = free_rules(self._placement, splits_backward=True)
        free = np.full(self._placement.ranks, np.inf)
        listing = listing_of(self._units, self._table, self._placement, free, rules)
        timing = Timing(listing, movable.fixed, limits, False)

        def climb(order: Order, trials: int, seed: int) -> tuple[float, Order]:
            random = np.random.default_rng(seed)
            draws = random.random((trials, 3))
            changes = Changes(np.array(_OF_ORDER), draws, _WARMTH, random.random(trials))
            start = np.array([order])
            state = Climb(start, np.zeros(1), changes, 0.0, start[0], np.zeros(len(order)), _NO_ACTIONS)
            return climbed(timing, table, state), state.order.tolist()

        starts = sorted(orders, key=lambda order: climb(order, 0, 0)[0])[:_STARTS]
        return [climb(order, trials, seed)[1] for seed, order in enumerate(starts, 1)]

    def excess(self, order: Order) -> float:
        """Return by which part of its limit the fullest rank is above it; 0 without limits."""
        return self._template.movable.excess(np.array(order), self._table, self._limits)

    def judged(self, order: Order) -> tuple[float, float]:
        """Return how far an order is above the limits, and how long its step takes."""
        return self.excess(order), self._best_weights(order)[0]

    def plan(self, order: Order, moves_weights: bool = True) -> Plan:
        """Return the plan with this ``order``, and with W where the step is shortest."""
        schedule = self._template.schedule
        if not moves_weights:
            return Plan(self._units, tuple(order), schedule, self._timed(order))
        seconds, patience = self._best_weights(order)
        if patience is not None:
            movable = self._template.movable
            seconds, done = movable.timed(np.array(order), self._table, patience)
            schedule = movable.with_weights_at(done)
        return Plan(self._units, tuple(order), schedule, seconds)

    def listed(self, candidates: Sequence[Order]) -> Plan:
        """Return the shortest plan in which actions, too, have another order than in the schedule."""
        table, schedule, best = self._table.by_row, self._template.schedule, None
        for rules in self._template.rules:
            listing = listing_of(self._units, self._table, self._placement, self._limits, rules)
            climb = _climb(candidates, [0.0] * len(candidates), listing)
            seconds = climbed(Timing(listing, no_fixed(), self._limits, True), table, climb)
            if seconds < math.inf and (best is None or seconds < best[0]):
                best = seconds, climb, rules
        if best is None:
            above = min(map(self.excess, candidates))
            raise InfeasibleLimit(
                "no order of these microbatches is found that keeps the memory limit: the nearest is "
                f"{above:.1%} above it on a rank; raise the limit, or let microbatches have fewer tokens"
            )
        seconds, climb, rules = best
        planned = replace(schedule, orders=orders_of(climb.actions, rules, len(self._units)))
        return Plan(self._units, tuple(climb.order.tolist()), planned, seconds)

    def _timed(self, order: Order) -> float:
        return self._template.fixed.timed(np.array(order), self._table)[0]

    def _best_weights(self, order: Order) -> tuple[float, float | None]:
        """Return the shortest step with this order, and the patience by which W are put into it.

        That is None where the schedule has them best.
        """
        shortest, best = self._timed(order), None
        movable = self._template.movable
        for patience in _PATIENCE if movable.moves_weights else ():
            seconds, _ = movable.timed(np.array(order), self._table, patience)
            if seconds < shortest:
                shortest, best = seconds, patience
        return shortest, best


def listed(
    units: Units,
    table: Table,
    placement: Placement,
    limits: Sequence[float],
    budget: float = BUDGET,
    splits_backward: bool = True,
) -> Plan:
    """Return the shortest plan by list scheduling that is found in ``budget`` seconds of a core.

    InfeasibleLimit where a rank cannot keep the longest document.
    """
    search = _Listed(units, table, placement, limits, splits_backward)
    actions = table.kept[0].size * (2 + splits_backward)
    passes = int((budget - actions * SECONDS_OF_AN_ACTION) * ACTIONS_PER_SECOND / actions)
    with without_collection():
        seconds, climb = search.climbed(min(max(len(_PACES), passes), _MOST_TRIALS))
        order = tuple(climb.order.tolist())
        names = ordered(units, order).names
        planned = orders_of(climb.actions, search.rules, len(units))
        schedule = Schedule(NAME, placement, len(units), planned, units=names)
    return Plan(units, order, schedule, seconds, min(search.lower_bound, seconds))


class _Listed:
    """A step of ``units`` whose actions have no order yet."""

    def __init__(
        self, units: Units, table: Table, placement: Placement, limits: Sequence[float], splits_backward: bool
    ) -> None:
        self.rules = free_rules(placement, splits_backward)
        self._listing = listing_of(units, table, placement, limits, self.rules)
        self._table, self._limits = table, limits

    @cached_property
    def lower_bound(self) -> float:
        """A makespan that no order is below."""
        return lower_bound(self._listing, self._table)

    def climbed(self, passes: int) -> tuple[float, Climb]:
        self._require_limits()
        work: list[float] = self._listing.chains.seconds.tolist()
        rule = orders.light_heavy_light(work)
        starts = [*repeat(rule, len(_PACES)), orders.heaviest_first(work), list(range(len(rule)))][:passes]
        paces = [*_PACES, 0.0, 0.0][:passes]
        # Equal chains do not move: all changes are of gaps.
        kinds = _OF_ENTRY if len(set(work)) > 1 else _OF_GAPS
        draws = np.random.default_rng(0).random((passes - len(starts), 3))
        changes = Changes(np.array(kinds), draws, 0.0, np.zeros(0))
        climb = _climb(starts, paces, self._listing, changes, self.lower_bound * _NEAR)
        timing = Timing(self._listing, no_fixed(), np.zeros(0), True)
        seconds = climbed(timing, self._table.by_row, climb)
        assert np.isfinite(seconds), "the reservation lets every order go on"
        return seconds, climb

    @property
    def is_feasible(self) -> bool:
        """Whether each rank can keep the longest document."""
        ranks = self._listing.ranks
        return bool((ranks.largest <= ranks.limits).all())

    def _require_limits(self) -> None:
        ranks = self._listing.ranks
        for rank, (needed, limit) in enumerate(zip(ranks.least, self._limits, strict=True)):
            if needed > ranks.limits[rank]:
                raise InfeasibleLimit(
                    f"the memory limit {limit:g} of rank {{rank}} is infeasible, it must keep the longest "
                    f"document's activations of all its stages: raise it to at least {needed:g}",
                    rank,
                )


_NO_ACTIONS = np.zeros((0, 0), np.int64)
_NO_CHANGES = Changes(np.zeros(3), np.zeros((0, 3)), 0.0, np.zeros(0))


def _climb(
    starts: Sequence[Order],
    paces: Sequence[float],
    listing: Listing,
    changes: Changes = _NO_CHANGES,
    floor: float = 0.0,
) -> Climb:
    """Return a climb by list scheduling from these orders of chains."""
    some = np.array(starts)
    actions = np.full((len(listing.ranks.limits), listing.state.queue.shape[1] * 3), -1)
    return Climb(some, np.array(paces), changes, floor, some[0].copy(), np.zeros(some.shape[1]), actions)


def _work_of_chains(units: Units, table: Table) -> list[float]:
    first = np.array([chain.start for chain in units.chains])
    return np.add.reduceat(table.work, first).tolist()


def _sizes(documents: Sequence[Sequence[int]], stages: int = 1) -> list[int]:
    """Return the sizes of units among which one is chosen, with no more actions than are planned."""
    longest = max(map(max, documents))
    fewest = 3 * stages * sum(map(sum, documents)) // LARGEST_PLAN
    sizes = [SMALLEST << step for step in range((LARGEST // SMALLEST).bit_length())]
    sizes = [size for size in sizes if size < 2 * longest] or sizes[:1]
    return [size for size in sizes if size > fewest] or sizes[-1:]
