"""Find the best schedule for measured costs under a memory limit.

Each published family needs one amount of memory and was worked out for F, I and W of equal length.
Here the costs of every stage and the memory of every rank are given, and a portfolio of methods
competes, each with a fixed number of trials so that every rank and every machine finds the same
schedule.  All proposals are judged alike: the best is valid, within every rank's limit, and the shortest
when simulated.  It is returned with a lower bound; the two bracket the optimum.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from megatron_pp_ext.compiler.bounds import lower_bound
from megatron_pp_ext.compiler.limits import at_most, least_limits, without_messages
from megatron_pp_ext.compiler.search import cache
from megatron_pp_ext.compiler.search.problem import TOLERANCE, Problem, problem_of
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement, Shape, linear, loop, v, wave
from megatron_pp_ext.schedule.simulate import Timeline, simulate

VERSION = 12
"""Raised with every change that lets the same inputs give another schedule, so that no cached one is used."""

TRIALS = 1000
"""The number of orders that a search may try on a pipeline of ordinary size; it is lower on larger ones."""

type _Feasible = tuple[Placement, Costs, tuple[float, ...]]
"""A placement with the costs of its stages, and what messages leave of each rank's limit for activations."""


class InfeasibleLimit(ValueError):
    """A memory limit that no schedule can keep; ``{rank}`` in the ``words`` stands for ``rank``."""

    def __init__(self, words: str = "", rank: int = 0) -> None:
        super().__init__(words.replace("{rank}", str(rank)))
        self._words, self._rank = words, rank

    def turned_over(self, ranks: int) -> "InfeasibleLimit":
        """Return the error for ``ranks`` that count from the other end."""
        return type(self)(self._words, ranks - 1 - self._rank)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A simulated schedule, and a bound on how much shorter any other could be.

    ``timeline.schedule`` is named "flex".  No schedule within the limit, with any of the placements
    considered, has a makespan below ``lower_bound``.  ``origin`` names, for people, the member of the
    portfolio that found the schedule.
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
    turn: cache.Turn = nullcontext,
) -> Compiled:
    """Return the shortest schedule found for ``ranks`` and ``microbatches`` within ``memory_limit``.

    ``costs`` are those of the finest cut of the model, ``len(costs.stages) == ranks * chunks``.
    Placements with fewer chunks merge neighbouring stages; with None, all placements that the cut
    allows are considered (``placements_of``).  ``memory_limit`` is in the unit of
    ``StageCosts.activation``, one number for all ranks or one for each; no rank's
    ``Timeline.peak_memory`` exceeds it.  ``trials`` bounds the search; with 0 only the published families
    are compared.  ``turn`` is entered where the schedule is not in the cache.  Where ``costs`` state that a
    pair takes less than its two actions (``Costs.pair``), the schedule may have pairs.

    The schedule is never longer than one of a published family, with pairs or without and with one of the
    placements, that keeps the limit with its own messages counted.  Raises ValueError for arguments that do
    not fit together and InfeasibleLimit, with the least feasible limit, where no order fits.
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
    for placement in placements:
        if placement.ranks != ranks:
            raise ValueError(f"{placement} is for {placement.ranks} ranks, not {ranks}: correct one of them")
    bounded = _feasible(placements, microbatches, costs, limits)
    if not bounded:
        least = [least_limits(costs, placement, microbatches) for placement in placements]
        raise _infeasible(least, limits, costs)
    feasible = [(placement, cut) for placement, cut, _ in bounded]
    bounds = [lower_bound(placement, microbatches, cut, rooms) for placement, cut, rooms in bounded]
    problems = [problem_of(placement, microbatches, cut, rooms) for placement, cut, rooms in bounded]
    spelled = [cache.spelled(*cut) for cut in feasible]
    name = cache.key([VERSION, catalog.NAMES, microbatches, trials, limits, spelled])

    def made() -> tuple[Timeline, str]:
        found = _shortest(feasible, problems, bounds, limits, trials)
        found = _with_features(found, feasible, microbatches, limits)
        check(found[0].schedule)
        cache.store(name, found[0].schedule, found[1])
        return found

    timeline, origin = cache.in_cache(name, turn, lambda: kept(name, feasible, microbatches, limits), made)
    bound = least_makespan(placements, microbatches, costs, limits)
    return Compiled(timeline, min(bound, timeline.makespan), origin)


def least_makespan(
    placements: Sequence[Placement], microbatches: int, costs: Costs, limits: Sequence[float]
) -> float:
    """Return a makespan below which ``compile_schedule`` finds nothing, infinite where no order fits.

    The arguments are the same, with a limit for each rank; the bound is one for orders in pairs, too.
    """
    return min(
        (
            lower_bound(placement, microbatches, cut, rooms, paired=True)
            for placement, cut, rooms in _feasible(placements, microbatches, costs, limits)
        ),
        default=math.inf,
    )


def placements_of(ranks: int, costs: Costs) -> tuple[Placement, ...]:
    """Return all placements on ``ranks`` ranks that the stages of ``costs`` can be merged for.

    Of schedules of equal length the compiler takes the first, so placements with few chunks come first, as
    they mean fewer messages, and those that turn round come before loops.

    Raises ValueError where ``ranks`` does not divide the number of stages.
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


def _limits(ranks: int, memory_limit: float | Sequence[float]) -> tuple[float, ...]:
    """Return one checked limit for each rank."""
    if isinstance(memory_limit, Sequence):
        limits = tuple(map(float, memory_limit))
        if len(limits) != ranks:
            raise ValueError(
                f"memory_limit has {len(limits)} values for {ranks} ranks: give one number, or one a rank"
            )
    else:
        limits = (float(memory_limit),) * ranks
    for limit in limits:
        if not math.isfinite(limit) or limit < 0:
            raise ValueError(
                f"the memory limit is {limit:g}, but must be a finite number, 0 or more: "
                "give it in the unit in which the costs count activations"
            )
    return limits


def _feasible(
    placements: Sequence[Placement], microbatches: int, costs: Costs, limits: Sequence[float]
) -> list[_Feasible]:
    """Return the placements for which an order keeps ``limits``, of the finest cut's ``costs``."""
    return [
        (placement, cut, without_messages(placement, microbatches, cut, limits))
        for placement in placements
        if all(map(at_most, least_limits(costs, placement, microbatches), limits))
        for cut in [costs.merged(placement.stages)]
    ]


def _infeasible(least: Iterable[tuple[float, ...]], limits: Sequence[float], costs: Costs) -> InfeasibleLimit:
    """Return the error for limits that are too low, about the placement with the lowest ``least`` limits."""
    needs = min(least, key=lambda needs: (max(needs), needs))
    rank = next(r for r, least in enumerate(needs) if not at_most(least, limits[r]))
    same = len(set(limits)) == 1
    messages = " and a few messages" if costs.message else ""
    return InfeasibleLimit(
        f"memory limit {limits[rank]:g} of rank {{rank}} is infeasible, it must keep one microbatch's "
        f"activations of all its stages{messages}: raise the limit to at least "
        f"{max(needs) if same else needs[rank]:g}",
        rank,
    )


def kept(
    name: str, cuts: Sequence[tuple[Placement, Costs]], microbatches: int, limits: Sequence[float]
) -> tuple[Timeline, str] | None:
    """Return the schedule in the cache and its origin; None if there is none that fits what is asked for."""
    found = cache.load(name)
    if found is None or found[0].microbatches != microbatches:
        return None
    schedule, origin = found
    for placement, costs in cuts:
        if placement == schedule.placement:
            timeline = simulate(schedule, costs)
            if all(map(at_most, timeline.peak_memory, limits)):
                return timeline, origin
    return None


def _shortest(
    cuts: Sequence[tuple[Placement, Costs]],
    problems: Sequence[Problem],
    bounds: Sequence[float],
    limits: Sequence[float],
    trials: int,
) -> tuple[Timeline, str]:
    """Return the shortest proposal of the portfolio and its origin; of equally long ones the first.

    The methods compare orders by integer makespan, which may be off by rounding.  So the proposals within
    ``CLOSE`` of the best are simulated and compared again.
    """
    # Imported here because it takes numba a second, which nobody needs who compiles nothing.
    from megatron_pp_ext.compiler.search.proposals import (
        CLOSE,
        Proposal,
        families_of,
        from_families,
        from_search,
    )

    proposals: list[Proposal] = []
    families = [families_of(problem) for problem in problems]
    for problem, (_, costs), ones in zip(problems, cuts, families, strict=True):
        proposals += from_families(problem, costs, limits, ones)
    # The most promising placement comes first: its result may make a search of the others unnecessary.
    for at in sorted(range(len(cuts)), key=bounds.__getitem__):
        (placement, costs), bound = cuts[at], bounds[at]
        shortest = min(proposal.makespan for proposal in proposals)
        if trials and bound < shortest * (1 - TOLERANCE) and not _is_dominated(placement, cuts):
            proposals += from_search(problems[at], costs, limits, families[at], trials, bound)

    shortest = min(proposal.makespan for proposal in proposals)
    best: tuple[Timeline, str] | None = None
    firsts: dict[float, Proposal] = {}
    for proposal in proposals:
        firsts.setdefault(proposal.makespan, proposal)
    for length, proposal in firsts.items():
        if length <= shortest * (1 + CLOSE):
            timeline = proposal.timeline
            if not all(map(at_most, timeline.peak_memory, limits)):
                raise AssertionError(f"{proposal.origin} breaks the limit it was made for")
            if best is None or timeline.makespan < best[0].makespan * (1 - TOLERANCE):
                best = timeline, f"{proposal.origin}, {proposal.problem.placement.shape} placement"
    assert best is not None
    return best


def _with_features(
    found: tuple[Timeline, str],
    cuts: Sequence[tuple[Placement, Costs]],
    microbatches: int,
    limits: Sequence[float],
) -> tuple[Timeline, str]:
    """Return the shortest of what was ``found`` and the orders of features that keep the limits."""
    best, origin = found
    for feature in FEATURES:
        for timeline, by in feature.compiled(*found, cuts, microbatches):
            fits = all(map(at_most, timeline.peak_memory, limits))
            if fits and timeline.makespan < best.makespan * (1 - TOLERANCE):
                best, origin = timeline, by
    return best, origin


def _is_dominated(placement: Placement, cuts: Sequence[tuple[Placement, Costs]]) -> bool:
    """Whether the search skips ``placement``, as another of ``cuts`` with as many chunks is better.

    A placement that turns round at the last rank has fewer messages between ranks than one that jumps back to
    the first, and its ranks need equal memory, which those of a loop do not.
    """
    turns = {other.chunks for other, _ in cuts if other.shape is not Shape.LOOP}
    return placement.shape is Shape.LOOP and placement.chunks in turns
