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

from megatron_pp_ext.schedule.bounds import lower_bound
from megatron_pp_ext.schedule.catalog import NAMES
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement, Shape, linear, loop, v, wave
from megatron_pp_ext.schedule.search import cache
from megatron_pp_ext.schedule.search.evaluate import run
from megatron_pp_ext.schedule.search.portfolio import search
from megatron_pp_ext.schedule.search.problem import TOLERANCE, Orders, Problem, problem_of
from megatron_pp_ext.schedule.search.published import published
from megatron_pp_ext.schedule.simulate import Timeline, simulate

VERSION = 6
"""Raised with every change that lets the same inputs give another schedule, so that no cached one is used."""

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
    if placements is not None and not placements:
        raise ValueError("no placements to choose from: name one, or leave them out for all")
    if placements is None:
        placements = placements_of(ranks, costs)
    cuts = [(placement, _cut(placement, ranks, costs)) for placement in placements]
    feasible = [cut for cut in cuts if all(map(_at_most, _least_limits(*cut), limits))]
    if not feasible:
        raise InfeasibleLimit(_infeasible(cuts, limits))

    bound = min(lower_bound(placement, microbatches, cut, limits) for placement, cut in feasible)
    name = cache.key([VERSION, NAMES, microbatches, trials, limits, [_spelled(*cut) for cut in feasible]])
    found = cache.load(name)
    if found is not None:
        schedule, notes = found
        for placement, cut in feasible:
            if placement == schedule.placement and microbatches == schedule.microbatches:
                timeline = simulate(schedule, cut)
                if _fits(timeline, limits):
                    return Compiled(timeline, min(bound, timeline.makespan), str(notes.get("origin")))

    timeline, origin = _shortest(feasible, microbatches, limits, trials)
    check(timeline.schedule)
    cache.store(name, timeline.schedule, {"origin": origin})
    return Compiled(timeline, min(bound, timeline.makespan), origin)


def frontier(
    ranks: int, microbatches: int, costs: Costs, limits: Sequence[float], *, trials: int = TRIALS
) -> list[Compiled]:
    """One schedule for each of the rising ``limits``, which are for all ranks alike.

    More memory never makes it longer: where ``compile_schedule`` finds nothing shorter than for the
    limit before, that schedule is taken again.  Raises what ``compile_schedule`` raises.
    """
    found: list[Compiled] = []
    for limit in limits:
        new = compile_schedule(ranks, microbatches, costs, limit, trials=trials)
        if found and found[-1].timeline.makespan < new.timeline.makespan:
            new = replace(found[-1], lower_bound=min(new.lower_bound, found[-1].timeline.makespan))
        found.append(new)
    return found


def placements_of(ranks: int, costs: Costs) -> tuple[Placement, ...]:
    """All placements that costs of this many stages can be cut for.

    Of schedules of equal length the first is taken: few chunks before many, as they mean fewer
    messages, and turns before loops.

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
            turns = v(ranks) if count == 2 else wave(ranks, count)
            found += [linear(ranks)] if count == 1 else [turns, loop(ranks, count)]
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
    cuts: Sequence[tuple[Placement, Costs]], microbatches: int, limits: Sequence[float], trials: int
) -> tuple[Timeline, str]:
    """The best of the portfolio; of equals the first.

    Methods compare orders by integer makespan, which may be off by rounding; the proposals that are
    within ``_CLOSE`` of the best are simulated, and that decides.
    """
    problems = [problem_of(placement, microbatches, costs, limits) for placement, costs in cuts]
    proposals: list[_Proposal] = []
    for problem, (_, costs) in zip(problems, cuts, strict=True):
        proposals += _published(problem, costs)
    bounds = [lower_bound(placement, microbatches, costs, limits) for placement, costs in cuts]
    # The most promising first: what it finds may spare the others their search.
    for at in sorted(range(len(cuts)), key=bounds.__getitem__):
        problem, (placement, costs), bound = problems[at], cuts[at], bounds[at]
        shortest = min(proposal.makespan for proposal in proposals)
        if trials and bound < shortest * (1 - TOLERANCE) and not _is_dominated(placement, cuts):
            floor = math.ceil(bound * problem.scale * (1 - TOLERANCE))
            for length, orders, origin in search(problem, trials, floor):
                proposals.append(_Proposal(length / problem.scale, problem, orders, costs, origin))

    shortest = min(proposal.makespan for proposal in proposals)
    best: tuple[Timeline, str] | None = None
    for proposal in proposals:
        if proposal.makespan <= shortest * (1 + _CLOSE):
            schedule = proposal.problem.schedule(proposal.orders, "flex")
            timeline = simulate(schedule, proposal.costs)
            if not _fits(timeline, limits):
                raise AssertionError(f"{proposal.origin} breaks the limit it was made for")
            if best is None or timeline.makespan < best[0].makespan * (1 - TOLERANCE):
                best = timeline, f"{proposal.origin}, {schedule.placement.shape} placement"
    assert best is not None
    return best


@dataclass(frozen=True, slots=True)
class _Proposal:
    """Orders within the limits, and their makespan in the units of the costs, up to rounding."""

    makespan: float
    problem: Problem
    orders: Orders
    costs: Costs
    origin: str


def _published(problem: Problem, costs: Costs) -> Iterator[_Proposal]:
    """The published families that keep the limits, or where there is none, the order that always does."""
    candidates = [
        (orders, f"published {schedule.name}")
        for schedule in published(problem.placement, problem.microbatches)
        if (orders := problem.orders(schedule)) is not None and problem.fits(orders)
    ]
    for orders, origin in candidates or [(one_at_a_time(problem), "one microbatch at a time")]:
        timed = run(problem, orders)
        if timed is not None:
            yield _Proposal(timed.makespan / problem.scale, problem, orders, costs, origin)


def _is_dominated(placement: Placement, cuts: Sequence[tuple[Placement, Costs]]) -> bool:
    """Whether a search had better use another placement.

    With as many chunks a rank, a placement that turns round at the last rank has fewer hops than one
    that jumps back to the first, and its ranks need the same memory where a loop's do not.
    """
    turns = {other.chunks for other, _ in cuts if other.shape is not Shape.LOOP}
    return placement.shape is Shape.LOOP and placement.chunks in turns


def one_at_a_time(problem: Problem) -> Orders:
    """The orders that fit wherever any do: a microbatch starts when the one before has ended."""
    orders: Orders = [[] for _ in range(problem.placement.ranks)]
    for _ in range(problem.microbatches):
        for station in range(problem.stations):
            orders[problem.home[station]].append(station)
            if station >= problem.placement.stages:
                orders[problem.home[station]].append(problem.weight_of(station))
    return orders
