"""The best schedule found for measured costs under a memory limit.

The published families are points: each has one amount of memory and was worked out for F, I and W
of equal length.  Here the costs of every stage and the memory of every rank are given, and a
portfolio of methods competes, each with a fixed number of trials so that every rank and every
machine finds the same schedule.  Whatever they propose is judged alike: valid, within every rank's
limit, and shortest when simulated.  A lower bound comes with the answer; the two bracket the optimum.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace

from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.bounds import lower_bound
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement, linear, loop, v, wave
from megatron_pp_ext.schedule.search import cache
from megatron_pp_ext.schedule.search.evaluate import makespan
from megatron_pp_ext.schedule.search.problem import TOLERANCE, Orders, Problem, problem_of
from megatron_pp_ext.schedule.search.published import published
from megatron_pp_ext.schedule.simulate import Timeline, simulate

VERSION = 1
"""Raised with every change that lets the same inputs give another schedule."""

TRIALS = 1000
"""How many orders a search may try on a pipeline of ordinary size; fewer on larger ones."""

_CLOSE = 1e-6
"""The fraction by which two makespans in integer time may be in the wrong order."""


class InfeasibleLimit(ValueError):
    """A memory limit that no schedule can keep."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A schedule with its clock and with how good it can be at most.

    ``timeline.schedule`` is named "flex".  ``lower_bound`` is a makespan that no schedule within the
    limit can be shorter than, with any of the placements considered.  ``origin`` says, for people,
    which member of the portfolio found the schedule.
    """

    timeline: Timeline
    lower_bound: float
    origin: str


def compile_schedule(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory_limit: float | Sequence[float],
    *,
    placements: Sequence[Placement] | None = None,
    trials: int = TRIALS,
) -> Compiled:
    """The shortest schedule found for ``ranks`` and ``microbatches`` within ``memory_limit``.

    ``costs`` are those of the finest cut of the model, ``len(costs.stages) == ranks * chunks``.
    Placements with fewer chunks merge neighbouring stages; with None, all placements that the cut
    allows are considered (``placements_of``).  ``memory_limit`` is in the unit of
    ``StageCosts.activation``: one number for all ranks or one a rank.  ``trials`` bounds the search;
    0 leaves the published families.

    The answer is never longer than that of a published family with one of the placements that
    keeps the limit.  Raises ValueError for arguments that do not fit together and InfeasibleLimit,
    with the least feasible limit, where no order fits.
    """
    if ranks < 2 or microbatches < 1 or trials < 0:
        raise ValueError(
            f"got {ranks} ranks, {microbatches} microbatches and {trials} trials, "
            "but a schedule has at least 2, 1 and 0 of them: correct them"
        )
    limits = _limits(ranks, memory_limit)
    if placements is None:
        placements = placements_of(ranks, costs)
    cuts = [(placement, _cut(placement, ranks, costs)) for placement in placements]
    feasible = [cut for cut in cuts if all(map(_at_most, _least_limits(*cut), limits))]
    if not feasible:
        raise InfeasibleLimit(_infeasible(cuts, limits))

    bound = min(lower_bound(placement, microbatches, cut, limits) for placement, cut in feasible)
    name = cache.key([VERSION, microbatches, trials, limits, [_spelled(*cut) for cut in feasible]])
    found = cache.load(name)
    if found is not None:
        schedule, notes = found
        for placement, cut in feasible:
            if placement == schedule.placement and microbatches == schedule.microbatches:
                timeline = simulate(schedule, cut)
                if _fits(timeline, limits):
                    return Compiled(timeline, min(bound, timeline.makespan), str(notes.get("origin")))

    timeline, origin = _shortest(feasible, microbatches, limits)
    schedule = replace(timeline.schedule, name="flex")
    check(schedule)
    cache.store(name, schedule, {"origin": origin})
    return Compiled(replace(timeline, schedule=schedule), min(bound, timeline.makespan), origin)


def placements_of(ranks: int, costs: Costs) -> tuple[Placement, ...]:
    """All placements that costs of this many stages can be cut for, the plainest first.

    ValueError where ``ranks`` does not divide the number of stages.
    """
    chunks, left = divmod(len(costs.stages), ranks)
    if left or not chunks:
        raise ValueError(
            f"costs are given for {len(costs.stages)} stages, which {ranks} ranks cannot hold evenly: "
            "give one StageCosts for each chunk of each rank"
        )
    found: list[Placement] = []
    for count in range(1, chunks + 1):
        if chunks % count == 0:
            more = [loop(ranks, count), v(ranks) if count == 2 else wave(ranks, count)]
            found += [linear(ranks)] if count == 1 else more
    return tuple(found)


def least_limits(ranks: int, costs: Costs, placement: Placement) -> tuple[float, ...]:
    """What each rank must be able to keep: one microbatch's activations of all its stages.

    The backward of a rank's first stage waits for the forward of its last, so there is no way to
    keep less; and one microbatch at a time needs no more.
    """
    return _least_limits(placement, _cut(placement, ranks, costs))


def _least_limits(placement: Placement, costs: Costs) -> tuple[float, ...]:
    return tuple(
        math.fsum(costs.stages[stage].activation for stage in placement.stages_of(rank))
        for rank in range(placement.ranks)
    )


def _limits(ranks: int, memory_limit: float | Sequence[float]) -> tuple[float, ...]:
    """One checked limit a rank."""
    if isinstance(memory_limit, Sequence):
        limits = tuple(map(float, memory_limit))
        if len(limits) != ranks:
            raise ValueError(
                f"memory_limit has {len(limits)} values for {ranks} ranks: give one number, or one a rank"
            )
    else:
        limits = (float(memory_limit),) * ranks
    for limit in limits:
        if not math.isfinite(limit) or limit <= 0:
            raise ValueError(
                f"memory_limit is {limit:g}, but must be a finite number above 0: "
                "give it in the unit of StageCosts.activation"
            )
    return limits


def _cut(placement: Placement, ranks: int, costs: Costs) -> Costs:
    """``costs`` for the stages of ``placement``."""
    if placement.ranks != ranks:
        raise ValueError(f"{placement} is for {placement.ranks} ranks, not {ranks}: correct one of them")
    return costs.merged(placement.stages)


def _at_most(amount: float, limit: float) -> bool:
    return amount <= limit * (1 + 2 * TOLERANCE)


def _fits(timeline: Timeline, limits: Sequence[float]) -> bool:
    return all(map(_at_most, timeline.peak_activations, limits))


def _infeasible(cuts: Sequence[tuple[Placement, Costs]], limits: Sequence[float]) -> str:
    """The error for limits below what every placement needs, after the one that needs least."""
    needs = min((_least_limits(*cut) for cut in cuts), key=lambda least: (max(least), least))
    rank = next(r for r, least in enumerate(needs) if not _at_most(least, limits[r]))
    same = len(set(limits)) == 1
    return (
        f"memory limit {limits[rank]:g} of rank {rank} is infeasible, it must keep one microbatch's "
        f"activations of all its stages: raise the limit to at least {max(needs) if same else needs[rank]:g}"
    )


def _spelled(placement: Placement, costs: Costs) -> list[object]:
    """The inputs in a form that is equal exactly when they are."""
    stages = [[float(value).hex() for value in astuple(stage)] for stage in costs.stages]
    return [placement.shape.value, placement.ranks, placement.chunks, float(costs.hop).hex(), stages]


def _shortest(
    cuts: Sequence[tuple[Placement, Costs]], microbatches: int, limits: Sequence[float]
) -> tuple[Timeline, str]:
    """The best of the portfolio; of equals the first.

    Methods compare orders by integer makespan, which may be off by rounding; the proposals that are
    within ``_CLOSE`` of the best are simulated, and that decides.
    """
    proposals = [
        (length / problem.scale, schedule, costs, f"{origin}, {placement.shape} placement")
        for placement, costs in cuts
        for problem in (problem_of(placement, microbatches, costs, limits),)
        for length, schedule, origin in _proposals(problem)
    ]
    shortest = min(length for length, *_ in proposals)
    best: tuple[Timeline, str] | None = None
    for length, schedule, costs, origin in proposals:
        if length <= shortest * (1 + _CLOSE):
            timeline = simulate(schedule, costs)
            if not _fits(timeline, limits):
                raise AssertionError(f"{origin} breaks the limit it was made for")
            if best is None or timeline.makespan < best[0].makespan * (1 - TOLERANCE):
                best = timeline, origin
    assert best is not None
    return best


def _proposals(problem: Problem) -> Iterator[tuple[int, Schedule, str]]:
    """Integer makespan, schedule and origin of what the portfolio has for one placement.

    All fit the limits, and there is at least one.
    """
    any_fits = False
    for schedule in published(problem.placement, problem.microbatches):
        orders = problem.orders(schedule)
        if orders is None or not problem.fits(orders):
            continue
        length = makespan(problem, orders)
        if length is not None:
            any_fits = True
            yield length, schedule, f"published {schedule.name}"
    if not any_fits:
        orders = one_at_a_time(problem)
        length = makespan(problem, orders)
        assert length is not None
        yield length, problem.schedule(orders, "one-at-a-time"), "one microbatch at a time"


def one_at_a_time(problem: Problem) -> Orders:
    """The orders that fit wherever any do: a microbatch starts when the one before has ended."""
    orders: Orders = [[] for _ in range(problem.placement.ranks)]
    for _ in range(problem.microbatches):
        for station in range(problem.stations):
            orders[problem.home[station]].append(station)
            if station >= problem.placement.stages:
                orders[problem.home[station]].append(problem.weight_of(station))
    return orders
