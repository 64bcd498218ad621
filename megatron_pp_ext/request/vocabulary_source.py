"""The source of a training run's schedules, with a vocabulary that all ranks share where it is requested."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from megatron_pp_ext.compiler.compile import TRIALS, InfeasibleLimit
from megatron_pp_ext.compiler.limits import least_limits
from megatron_pp_ext.request.pipeline import Request
from megatron_pp_ext.request.source import FreeBytes, Source, compile_once, source_of
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.names import AUTO, FLEX, SHARED
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.schedule.vocabulary import share

_WORTH_SHARING = 0.01
"""The part of a step that sharing the vocabulary has to save before ``auto`` chooses it."""

_ATTEMPTS = 8
"""The limits tried for what a compiled schedule keeps beside its ranks' parts of the vocabulary."""


class CostsOf(Protocol):
    """The costs to compile from."""

    def __call__(self, stages: int, shares_vocabulary: bool) -> Costs:
        """Return those of ``stages`` stages; they may count a vocabulary that the ranks share."""


def requested_source(request: Request, costs_of: CostsOf) -> Source:
    """Return the source of ``request``'s schedules.

    Raises what ``compile_schedule`` raises where ``flex`` cannot keep its limit.
    """
    if request.vocabulary == SHARED:
        return _sharing(request, costs_of)
    if request.vocabulary == AUTO:
        return _shorter_of_both(request, costs_of)
    return source_of(request, partial(costs_of, shares_vocabulary=False))


def _sharing(request: Request, costs_of: CostsOf) -> Source:
    """Return the source of ``request``'s schedules with a vocabulary that all ranks share."""
    if request.schedule in (FLEX, AUTO):
        return compiled_beside_vocabulary(request, costs_of(request.finest.stages, True))
    plain = source_of(request, partial(costs_of, shares_vocabulary=True))

    def build(microbatches: int, free_bytes: FreeBytes | None) -> Schedule:
        return share(lambda count: plain.build(count, free_bytes), microbatches)

    return replace(
        plain, placement=replace(plain.placement, shares_vocabulary=True), build=build, limits=None
    )


def _shorter_of_both(request: Request, costs_of: CostsOf) -> Source:
    """Return the source that shares the vocabulary, or the one that does not: the one with shorter steps."""
    alone = source_of(request, partial(costs_of, shares_vocabulary=False))
    try:
        sources = alone, _sharing(request, costs_of)
    except InfeasibleLimit:
        return replace(alone, note="vocabulary not shared: the memory limit has no room for its parts")
    separate, shared = (
        simulate(
            source.build(request.microbatches, None),
            costs_of(request.finest.stages, bool(is_shared)).merged(source.placement.stages),
        ).makespan
        for is_shared, source in enumerate(sources)
    )
    gain = 1 - shared / separate
    if gain < _WORTH_SHARING:
        return replace(sources[0], note=f"vocabulary not shared: that would change a step by {-gain:+.1%}")
    return replace(sources[1], note=f"vocabulary shared: steps are {gain:.1%} shorter by prediction")


def compiled_beside_vocabulary(request: Request, costs: Costs, trials: int = TRIALS) -> Source:
    """Return the source of ``flex`` or ``auto`` with a shared vocabulary, whose parts count in the limit.

    ``costs`` are those of the stages of ``request.finest``; each compilation tries ``trials`` orders.
    Raises what ``compile_schedule`` raises where ``flex`` cannot keep its limit.
    """
    ranks, is_auto = request.ranks, request.schedule == AUTO
    limit, counted = (math.inf, costs) if is_auto else request.limited(costs)

    def within(limit: float, microbatches: int, placement: Placement) -> Schedule:
        def build(count: int) -> Schedule:
            return compile_once(ranks, count, counted, room, [placement], trials)

        cut, room = counted.merged(placement.stages), limit
        with suppress(InfeasibleLimit):
            for _ in range(_ATTEMPTS):
                schedule = share(build, microbatches)
                excess = max(simulate(schedule, cut).peak_memory) - limit
                if excess <= 0:
                    return schedule
                room -= excess
                if room <= 0:
                    break
        raise InfeasibleLimit(
            f"a memory limit of {limit:.6g} has no room for the parts of a shared vocabulary; raise "
            "--pipeline-memory-limit, or leave --pipeline-vocabulary out"
        )

    def least(microbatches: int) -> Schedule:
        lowest = max(least_limits(ranks, counted, placement))

        def build(count: int) -> Schedule:
            return compile_once(ranks, count, counted, lowest, [placement], trials)

        return share(build, microbatches)

    def build(microbatches: int, free_bytes: FreeBytes | None) -> Schedule:
        if not is_auto:
            return within(limit, microbatches, placement)
        smallest = least(microbatches)
        if free_bytes is None:
            return smallest
        needed = max(simulate(smallest, counted.merged(placement.stages)).peak_memory)
        free = free_bytes()
        return within(free, microbatches, placement) if free > needed else smallest

    if is_auto:
        placement = request.placement
        ordinary = None
    else:
        ordinary = _shortest_feasible(
            request.placements, lambda placement: within(limit, request.microbatches, placement), counted
        )
        placement = replace(ordinary.placement, shares_vocabulary=False)
    shared = replace(placement, shares_vocabulary=True)
    return Source(request.schedule, shared, True, build, known=ordinary)


def _shortest_feasible(
    placements: Sequence[Placement], build: Callable[[Placement], Schedule], costs: Costs
) -> Schedule:
    """Return the shortest of the schedules that ``build`` returns; InfeasibleLimit where it never does."""
    found, reason = [], InfeasibleLimit()
    for placement in placements:
        try:
            schedule = build(placement)
            found.append((simulate(schedule, costs.merged(placement.stages)).makespan, schedule))
        except InfeasibleLimit as error:
            reason = error
    if not found:
        raise reason
    return min(found, key=lambda one: one[0])[1]
