"""The pass of the shared vocabulary: its parts stand in the order, and count in a limit of memory."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from megatron_pp_ext.compiler.limits import Budget, InfeasibleLimit, least_limits
from megatron_pp_ext.compiler.make import Made, Make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.vocabulary.share import share, share_evaluation, without_weight_gradients
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.entry import FORWARD_ONLY
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import Timeline, simulate

_WORTH_SHARING = 0.01
"""The part of a step that sharing the vocabulary has to save before ``auto`` chooses it."""

_ATTEMPTS = 8
"""The budgets tried for the stages' activations, so that the parts of the vocabulary fit in the limit too."""


def shared(request: Request, costs: CostModel, before: Make) -> Made:
    """Share the vocabulary where it is requested, or under ``auto`` where that makes the step shorter."""
    if request.splits_head:
        return Made(_shared(request, costs, before), about="vocabulary shared by all ranks")
    return _shorter_of_both(request, costs, before)


def without_frozen_weight(result: Made) -> Made:
    """Leave out the weight gradients of an output layer that is frozen."""
    return replace(result, schedule=without_weight_gradients(result.schedule))


def _shared(request: Request, costs: CostModel, before: Make) -> Schedule:
    if request.is_compiled:
        return _compiled(request, costs, before)
    if request.schedule == FORWARD_ONLY:
        return share_evaluation(before(request).schedule)
    return share(lambda count: before(replace(request, microbatches=count)).schedule, request.microbatches)


def _shorter_of_both(request: Request, costs: CostModel, before: Make) -> Made:
    alone = before(replace(request, splits_head=False))
    try:
        schedules = alone.schedule, _shared(replace(request, splits_head=True), costs, before)
    except InfeasibleLimit:
        return replace(alone, note="vocabulary not shared: the memory limit has no room for its parts")
    separate, shared = (simulate(schedule, costs.of(schedule.placement)).makespan for schedule in schedules)
    gain = 1 - shared / separate
    if gain < _WORTH_SHARING:
        return replace(alone, note=f"vocabulary not shared: that would change a step by {-gain:+.1%}")
    return Made(schedules[1], f"vocabulary shared: steps are {gain:.1%} shorter by the estimate")


def _compiled(request: Request, costs: CostModel, before: Make) -> Schedule:
    """Compile with the parts of the vocabulary in the limit.

    A fraction as limit is one of 1F1B's peak without sharing.  Under ``auto`` each rank has its free memory,
    but no less than the order needs that keeps least.
    """
    is_auto = catalog.abilities(request.schedule).measures_memory
    split_costs = costs.of(request.finest)
    if is_auto and not isinstance(request.limit, Budget):
        compiler = _VocabularyCompiler(request, split_costs, before)
        least = compiler.least(request.placement)
        if request.free is None:
            return least
        free = tuple(map(max, compiler.needed(least), request.free))
        return compiler.within(free, request.placement)
    budget = request.budget(costs.of(replace(request.finest, splits_head=False)))
    compiler = _VocabularyCompiler(request, budget.counted(split_costs), before, budget.holds_messages)
    schedules, reason = [], InfeasibleLimit()
    for placement in request.placements:
        try:
            schedules.append(compiler.within(budget.ranks, placement))
        except InfeasibleLimit as error:
            reason = error
    if not schedules:
        raise reason
    return min(schedules, key=lambda schedule: compiler.simulated(schedule).makespan)


@dataclass(frozen=True, slots=True)
class _VocabularyCompiler:
    """Compiles orders with the vocabulary's S and T on every rank; ``costs`` are of the finest stages."""

    request: Request
    costs: Costs
    before: Make
    holds_messages: bool = True

    def within(self, limits: Sequence[float], placement: Placement) -> Schedule:
        """Return a schedule that keeps every rank's limit, parts included; InfeasibleLimit without one.

        It is no longer than the one for the least limit on all ranks: more memory on some of them does not
        always lead the compiler to a shorter schedule.
        """
        schedule = self._keeping(limits, placement)
        if len(set(limits)) == 1:
            return schedule
        with suppress(InfeasibleLimit):
            alike = self._keeping((min(limits),) * len(limits), placement)
            return min(schedule, alike, key=lambda order: self.simulated(order).makespan)
        return schedule

    def _keeping(self, limits: Sequence[float], placement: Placement) -> Schedule:
        """Return a schedule that keeps ``limits``; InfeasibleLimit without one.

        The parts' bytes are known once they are in the order, so the budgets of the stages are lowered by
        the excess.  The last try is the order that keeps least.
        """
        budgets = list(limits)
        with suppress(InfeasibleLimit):
            for _ in range(_ATTEMPTS):
                schedule = self._shared(budgets, placement)
                excess = [amount - limit for amount, limit in zip(self.needed(schedule), limits, strict=True)]
                if max(excess) <= 0:
                    return schedule
                budgets = [budget - max(0.0, more) for budget, more in zip(budgets, excess, strict=True)]
                if min(budgets) <= 0:
                    break
        least = self.least(placement)
        needs = self.needed(least)
        rank, limit, peak = max(
            zip(range(len(needs)), limits, needs, strict=True), key=lambda entry: entry[2] - entry[1]
        )
        if peak <= limit:
            return least
        raise InfeasibleLimit(
            f"a memory limit of {limit:.6g} on rank {{rank}} has no room for the parts of a shared "
            f"vocabulary, with which the order that keeps least keeps {peak:.6g} there; raise "
            "--pipeline-memory-limit, or leave --pipeline-vocabulary out",
            rank,
        )

    def least(self, placement: Placement) -> Schedule:
        """Return the schedule whose stages keep least on every rank."""
        return self._shared(least_limits(self.costs, placement), placement)

    def needed(self, schedule: Schedule) -> tuple[float, ...]:
        return self.simulated(schedule).peak_memory

    def simulated(self, schedule: Schedule) -> Timeline:
        return simulate(schedule, self.costs.merged(schedule.placement.stages))

    def _shared(self, budgets: Sequence[float], placement: Placement) -> Schedule:
        request = replace(
            self.request, placements=(placement,), limit=Budget(tuple(budgets), self.holds_messages)
        )
        return share(
            lambda count: self.before(replace(request, microbatches=count)).schedule, request.microbatches
        )
