"""Schedules that the commands compile for costs and a memory limit."""

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_pp_ext.compiler.limits import LARGEST_FRACTION, InfeasibleLimit, kept_by_1f1b, least_limits
from megatron_pp_ext.compiler.make import Made, make
from megatron_pp_ext.compiler.request import Option, Request, named, placements_of
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.entry import FLEX
from megatron_pp_ext.schedule.simulate import Timeline, simulate

_FRACTIONS = (1 / 3, 5 / 12, 1 / 2, 7 / 12, 2 / 3, 5 / 6, 1)


def flex_request(ranks: int, microbatches: int, chunks: int | None, limit: float | None) -> Request:
    """The request for ``flex`` within ``limit``, whose meaning ``compiler.limits.requested_budget`` gives.

    ValueError without a limit, and for sizes below the least.
    """
    fix = f"give a fraction of 1f1b's peak, such as 0.5, or an amount above {LARGEST_FRACTION:g}"
    if limit is None:
        raise ValueError(f"flex needs --memory-limit, the memory that a rank may keep: {fix}")
    if not 0 < limit < math.inf:
        raise ValueError(f"--memory-limit is {limit:g}, but a rank's memory is a number above 0: {fix}")
    if ranks < 2 or chunks == 0:
        raise ValueError(
            f"flex got {ranks} rank(s) with {2 if chunks is None else chunks} chunks each, but needs 2 and 1 "
            "or more: raise them"
        )
    return named(FLEX, ranks, microbatches, chunks, limit)


def make_flex(request: Request, costs: CostModel) -> Made:
    """The best schedule found for ``costs`` of the finest cut; ValueError for a limit that cannot be kept."""
    limit, ranks = request.limit, request.ranks
    assert isinstance(limit, float)
    try:
        return make(request, costs)
    except InfeasibleLimit:
        if limit > LARGEST_FRACTION:
            raise
        all_costs = costs.of(request.finest)
        whole = kept_by_1f1b(ranks, request.microbatches, all_costs)
        silent = replace(all_costs, message=0.0)
        least = min(max(least_limits(silent, placement)) for placement in placements_of(ranks, silent))
        raise InfeasibleLimit(
            f"memory limit {limit:g} of 1f1b's peak is infeasible, a rank must keep one microbatch's "
            f"activations of all its stages: raise it to at least {least / whole:.4g}"
        ) from None


def some_limits(
    ranks: int, microbatches: int, costs: Costs, options: tuple[Option, ...] = ()
) -> dict[float, Timeline]:
    """Return the best schedules for some fractions of 1F1B's peak, where these are feasible.

    ``options`` are the features'.  More memory never makes the schedule longer: where a longer one is
    found than for the fraction before, the one before is used again.
    """
    best: dict[float, Timeline] = {}
    for fraction in _FRACTIONS:
        request = named(FLEX, ranks, microbatches, limit=fraction)
        try:
            new = timeline(replace(request, options=options), costs)
        except InfeasibleLimit:
            continue
        last = next(reversed(best.values()), new)
        best[fraction] = last if last.makespan < new.makespan else new
    return best


def timeline(request: Request, costs: Costs) -> Timeline:
    """Return the step of ``request``, whose memory limit holds activations alone."""
    schedule = make(request, CostModel.fixed(costs)).schedule
    return simulate(schedule, replace(costs, message=0.0).merged(schedule.placement.stages))


def undominated(timelines: Sequence[Timeline]) -> list[Timeline]:
    """The timelines that no other beats in both memory and time, by rising memory."""
    best: list[Timeline] = []
    for timeline in sorted(timelines, key=lambda line: (max(line.peak_microbatches), line.makespan)):
        if not best or timeline.makespan < best[-1].makespan:
            best.append(timeline)
    return best
