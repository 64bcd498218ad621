"""Schedules compiled for costs and a memory limit, as the command line asks for them."""

from collections.abc import Sequence

from megatron_pp_ext.compiler.compile import (
    Compiled,
    InfeasibleLimit,
    compile_schedule,
    frontier,
    least_limits,
    placements_of,
)
from megatron_pp_ext.compiler.limits import LARGEST_FRACTION, asked_for
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import Timeline

_FRACTIONS = (1 / 3, 5 / 12, 1 / 2, 7 / 12, 2 / 3, 5 / 6, 1)


def compiled(ranks: int, microbatches: int, costs: Costs, limit: float | None, trials: int) -> Compiled:
    """The best schedule that ``trials`` trials find within ``limit``.

    What ``limit`` means, ``schedule.limits.asked_for`` says.  ValueError without a limit and for one that
    cannot be kept.
    """
    if limit is None:
        raise ValueError("flex needs --memory-limit: give a fraction of 1f1b's peak, such as 0.5, or bytes")
    amount, counted = asked_for(limit, ranks, microbatches, costs)
    try:
        return compile_schedule(ranks, microbatches, counted, amount, trials=trials)
    except InfeasibleLimit:
        if limit > LARGEST_FRACTION:
            raise
        least, whole = _least(ranks, counted), amount / limit
        raise InfeasibleLimit(
            f"memory limit {limit:g} of 1f1b's peak is infeasible, a rank must keep one microbatch's "
            f"activations of all its stages: raise it to at least {least / whole:.4g}"
        ) from None


def some_limits(ranks: int, microbatches: int, costs: Costs) -> dict[float, Compiled]:
    """The best schedules found for some fractions of 1F1B's peak, those that are feasible."""
    whole, counted = asked_for(1.0, ranks, microbatches, costs)
    fractions = [fraction for fraction in _FRACTIONS if fraction * whole >= _least(ranks, counted)]
    found = frontier(ranks, microbatches, counted, [fraction * whole for fraction in fractions])
    return dict(zip(fractions, found, strict=True))


def _least(ranks: int, costs: Costs) -> float:
    """What every rank must be able to keep, in the placement that needs least."""
    return min(max(least_limits(ranks, costs, where)) for where in placements_of(ranks, costs))


def undominated(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Those that no other beats in both memory and time, by rising memory."""
    kept: list[Timeline] = []
    for timeline in sorted(timelines, key=lambda line: (max(line.peak_microbatches), line.makespan)):
        if not kept or timeline.makespan < kept[-1].makespan:
            kept.append(timeline)
    return kept
