"""The plan of a step: in which order its microbatches go through the schedule, and where W stand in it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_pp_ext.compiler.compile import InfeasibleLimit
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.lengths import orders
from megatron_pp_ext.features.lengths.durations import in_whole_numbers
from megatron_pp_ext.features.lengths.length_costs import LengthCosts
from megatron_pp_ext.features.lengths.microbatches import Microbatches
from megatron_pp_ext.features.lengths.orders import How
from megatron_pp_ext.features.lengths.steps import Floats, Integers, Movable, Table, table_of
from megatron_pp_ext.features.lengths.timing import excess_of, judge, search, time_order
from megatron_pp_ext.features.lengths.within import Within
from megatron_pp_ext.schedule.actions import OF_STAGES, Kind, Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.unit_costs import UnitCosts

BUDGET = 0.05
"""The seconds of one core that a plan may take by default."""

STEPS_PER_SECOND = 130e6
"""How many steps of a schedule one core times in a second, at least.

The budget is turned into a number of trials by this, and not by a clock: all ranks must find the same order.
"""

_STEPS_OF_A_TRIAL = 40
"""The steps in whose time a trial's order is changed, whatever the schedule."""

_STARTS = 3
"""How many of the orders that are known the search starts from."""

_PATIENCE = (1.0, 0.75, 0.5, 0.25, 0.0)
"""How long holes for W may be, as parts of a W (``timing.timed``)."""


class Plan(NamedTuple):
    """The plan of a step: microbatch ``order[k]`` of the data is microbatch k of ``schedule``.

    ``seconds`` is how long the pipeline takes by simulation.
    """

    order: tuple[int, ...]
    schedule: Schedule
    seconds: float


class Planner:
    """Plans steps under one ``schedule``, which has the microbatches in the order of the data.

    What does not depend on lengths is computed once.  Without ``moves_weights`` W stay where they are.
    """

    def __init__(self, schedule: Schedule, moves_weights: bool = True) -> None:
        self.schedule = schedule
        self._fixed = Movable(schedule, moves_weights=False)
        self._movable = Movable(schedule) if moves_weights else self._fixed

    def plan(
        self,
        costs: UnitCosts,
        how: How = "search",
        *,
        budget: float = BUDGET,
        limits: Sequence[float] | None = None,
    ) -> Plan:
        """Return the plan of the step whose microbatches have ``costs``, in the order of the data.

        ``limits`` are what each rank may keep, in the unit of ``StageCosts.activation``.  An order by the
        rule that does not keep them is searched for instead, and where none is found, F, I and W too get
        other orders than the schedule's.  One that is given is left alone.  Equal arguments give an equal
        plan on every machine.  Raises ValueError for another number of microbatches
        or stages than the schedule has, and InfeasibleLimit where no order is found that keeps the limits.
        """
        self._require_sizes(costs)
        table, room = table_of(costs), np.array(limits or (), float)
        given = list(range(len(costs.units)))
        if how == "given" or (table.seconds == table.seconds[:, :1]).all():
            return self._in_order(given, table, moves_weights=how != "given")
        work = self._work(table)
        rule = self._by_rule(work, table)
        if how == "rule" and not self._excess(rule, table, room):
            return self._in_order(rule, table)
        elsewhere = [other(work, costs.tokens) for other in orders.ELSEWHERE.values()]
        known = list(map(list, dict.fromkeys(map(tuple, (rule, given, *elsewhere)))))
        found = [*self._searched(known, table, budget, room), *known]
        best = min(found, key=lambda order: self._judged(order, table, room))
        if above := self._excess(best, table, room):
            return self._listed(found, table, room, above)
        return self._in_order(best, table)

    def in_order(self, costs: UnitCosts, order: Sequence[int]) -> Plan:
        """Return the plan with this ``order``, under the schedule as it is."""
        self._require_sizes(costs)
        return self._in_order(list(order), table_of(costs), moves_weights=False)

    def timed(self, plan: Plan, costs: UnitCosts) -> Plan:
        """Return ``plan`` with the times of its microbatches, by which ranks launch.

        ``costs`` are those that it was made for.  A plan of equal microbatches stays as it is.
        """
        seconds = table_of(costs).seconds
        if (seconds == seconds[:, :1]).all():
            return plan
        of_stages = seconds[: len(OF_STAGES) * self.schedule.placement.stages, list(plan.order)]
        return plan._replace(schedule=replace(plan.schedule, durations=in_whole_numbers(of_stages)))

    def work(self, costs: UnitCosts) -> list[float]:
        """Return the seconds that all ranks together work on each microbatch."""
        return self._work(table_of(costs))

    def _work(self, table: Table) -> list[float]:
        return table.seconds[self._work_rows].sum(axis=0).tolist()

    @property
    def _work_rows(self) -> list[int]:
        """The rows of whole forwards and whole backwards."""
        kinds = len(OF_STAGES)
        return [
            kinds * stage + OF_STAGES.index(kind)
            for stage in range(self.schedule.placement.stages)
            for kind in (Kind.F, Kind.B)
        ]

    def _by_rule(self, work: Sequence[float], table: Table) -> orders.Order:
        found = orders.by_rule(work, self.schedule.placement)
        return min(found, key=lambda order: self._best_weights(order, table)[0]) if found[1:] else found[0]

    def _searched(
        self, known: Sequence[orders.Order], table: Table, budget: float, room: Floats
    ) -> list[orders.Order]:
        """Return the best orders that are found from the ``known`` ones."""
        steps, memory = self._movable.steps, self._movable.memory
        ends, done = _scratch(self._movable)

        def length(order: orders.Order) -> float:
            return judge(steps, table, memory, room, np.array(order, np.int64), ends, done)

        found = list[orders.Order]()
        actions = len(steps.before) + len(steps.weights.row) + len(memory.slot) * bool(len(room))
        trials = int(budget * STEPS_PER_SECOND / (_STARTS * (actions + _STEPS_OF_A_TRIAL)))
        for seed, start in enumerate(sorted(known, key=length)[:_STARTS], 1):
            best = np.array(start, np.int64)
            search(steps, table, memory, room, best, trials, np.array([seed]), ends, done)
            found.append(best.tolist())
        return found

    def _listed(self, found: Sequence[orders.Order], table: Table, room: Floats, above: float) -> Plan:
        """Return the shortest plan in which actions, too, have another order than in the schedule."""
        best: tuple[float, Integers, orders.Order] | None = None
        for order in found:
            listed = self._within.listed(order, table, room)
            if listed is not None and (best is None or listed[0] < best[0]):
                best = *listed, order
        if best is None:
            raise InfeasibleLimit(
                "no order of these microbatches is found that keeps the memory limit: the nearest is "
                f"{above:.1%} above it on a rank; raise the limit, or let microbatches have fewer tokens"
            )
        seconds, numbers, order = best
        return Plan(tuple(order), self._within.schedule(numbers), seconds)

    @cached_property
    def _within(self) -> Within:
        return Within(self.schedule, self._movable.memory)

    def _judged(self, order: orders.Order, table: Table, room: Floats) -> tuple[float, float]:
        """Return how far an order is above the limits, and how long its step takes."""
        return self._excess(order, table, room), self._best_weights(order, table)[0]

    def _excess(self, order: orders.Order, table: Table, room: Floats) -> float:
        """Return by which part of its limit the fullest rank is above it; 0 without limits."""
        if not len(room):
            return 0.0
        return excess_of(self._movable.memory, room, table, np.array(order, np.int64))

    def _in_order(self, order: orders.Order, table: Table, moves_weights: bool = True) -> Plan:
        """Return the plan with this order, and with W where the step is shortest."""
        if not moves_weights:
            return Plan(tuple(order), self.schedule, self._timed(self._fixed, order, table)[0])
        seconds, patience = self._best_weights(order, table)
        if patience is None:
            return Plan(tuple(order), self.schedule, seconds)
        seconds, done = self._timed(self._movable, order, table, patience)
        return Plan(tuple(order), self._movable.with_weights_at(done), seconds)

    def _best_weights(self, order: orders.Order, table: Table) -> tuple[float, float | None]:
        """Return the shortest step with this order, and the patience by which W are put into it.

        That is None where the schedule has them best.
        """
        shortest, best = self._timed(self._fixed, order, table)[0], None
        for patience in _PATIENCE if len(self._movable.steps.weights.row) else ():
            seconds, _ = self._timed(self._movable, order, table, patience)
            if seconds < shortest:
                shortest, best = seconds, patience
        return shortest, best

    @staticmethod
    def _timed(
        movable: Movable, order: orders.Order, table: Table, patience: float = 1.0
    ) -> tuple[float, Integers]:
        """Return how long a step takes, and the W that are done before each of its steps."""
        ends, done = _scratch(movable)
        seconds = time_order(movable.steps, table, np.array(order, np.int64), patience, ends, done)
        return seconds, done

    def _require_sizes(self, costs: UnitCosts) -> None:
        if len(costs.units) != self.schedule.microbatches:
            raise ValueError(
                f"there are costs of {len(costs.units)} microbatches, but the schedule has "
                f"{self.schedule.microbatches}: give as many"
            )
        if len(costs.stages) != self.schedule.placement.stages:
            raise ValueError(
                f"there are costs of {len(costs.stages)} stages, but the schedule has "
                f"{self.schedule.placement.stages}: give one for each stage"
            )


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
    steps keep a ``Planner`` of it.  Raises what ``make`` and ``Planner.plan`` raise.
    """
    microbatches = Microbatches.of(lengths)
    in_step = costs.of(microbatches)
    means = Costs(in_step.stages, in_step.hop, in_step.message, in_step.head, in_step.pair)
    planner = Planner(make(request, CostModel.fixed(means)).schedule)
    limits = None if request.limit is None else request.budget(in_step).ranks
    cut = in_step.merged(planner.schedule.placement.stages)
    return planner.plan(cut, how, budget=budget, limits=limits)


def _scratch(movable: Movable) -> tuple[Floats, Integers]:
    count = len(movable.steps.before)
    return np.zeros(count), np.zeros(count, np.int64)
