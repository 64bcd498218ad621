"""Find the best schedule for measured costs under a memory limit.

Each published family needs one amount of memory and was worked out for F, I and W of equal length.
Here the costs of every stage and the memory of every rank are given, and a portfolio of methods
competes, each with a fixed number of trials so that every rank and every machine finds the same
schedule.  All proposals are judged alike: the best is valid, within every rank's limit, and the shortest
when simulated.  It is returned with a lower bound; the two bracket the optimum.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from megatron_pp_ext.compiler import cache
from megatron_pp_ext.compiler.bounds import Cut
from megatron_pp_ext.compiler.limits import TOLERANCE, InfeasibleLimit, at_most
from megatron_pp_ext.compiler.request import TRIALS, placements_of
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement, Shape
from megatron_pp_ext.schedule.simulate import Timeline, simulate

VERSION = 12
"""Raised with every change that lets the same inputs give another schedule, so that no cached one is used."""


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
    lock: cache.Lock = nullcontext,
) -> Compiled:
    """Return the shortest schedule found for ``ranks`` and ``microbatches`` within ``memory_limit``.

    ``costs`` are those of the finest cut of the model, ``len(costs.stages) == ranks * chunks``.
    Placements with fewer chunks merge neighbouring stages; with None, all placements that the cut
    allows are considered (``placements_of``).  ``memory_limit`` is in the unit of
    ``StageCosts.activation``, one number for all ranks or one for each; no rank's
    ``Timeline.peak_memory`` exceeds it.  ``trials`` bounds the search; with 0 only the published families
    are compared.  ``lock`` is entered where the schedule is not in the cache.  Where ``costs`` state that a
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
    cuts = Cut.all_of(placements, microbatches, costs, limits)
    feasible = [cut for cut in cuts if cut.is_feasible]
    if not feasible:
        raise _infeasible(cuts)
    spelled = [cache.spelled(cut.placement, cut.costs) for cut in feasible]
    name = cache.key([VERSION, catalog.NAMES, microbatches, trials, limits, spelled])

    def compiled() -> tuple[Timeline, str]:
        best = _with_features(_shortest(feasible, trials), feasible)
        check(best[0].schedule)
        cache.store(name, best[0].schedule, best[1])
        return best

    timeline, origin = cache.in_cache(name, lock, lambda: from_cache(name, feasible), compiled)
    bound = min(cut.bound(paired=True) for cut in feasible)
    return Compiled(timeline, min(bound, timeline.makespan), origin)


def least_makespan(
    placements: Sequence[Placement], microbatches: int, costs: Costs, limits: tuple[float, ...]
) -> float:
    """Return a makespan below which ``compile_schedule`` finds nothing, infinite where no order fits.

    The arguments are the same, with a limit for each rank; the bound is one for orders in pairs, too.
    """
    cuts = Cut.all_of(placements, microbatches, costs, limits)
    return min((cut.bound(paired=True) for cut in cuts if cut.is_feasible), default=math.inf)


def _limits(ranks: int, memory_limit: float | Sequence[float]) -> tuple[float, ...]:
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


def _infeasible(cuts: Sequence[Cut]) -> InfeasibleLimit:
    """Return the error for limits that are too low, about the placement that needs the lowest ones."""
    needs, limits = min((cut.least for cut in cuts), key=lambda least: (max(least), least)), cuts[0].limits
    rank = next(r for r, least in enumerate(needs) if not at_most(least, limits[r]))
    same = len(set(limits)) == 1
    messages = " and a few messages" if cuts[0].costs.message else ""
    return InfeasibleLimit(
        f"memory limit {limits[rank]:g} of rank {{rank}} is infeasible, it must keep one microbatch's "
        f"activations of all its stages{messages}: raise the limit to at least "
        f"{max(needs) if same else needs[rank]:g}",
        rank,
    )


def from_cache(name: str, cuts: Sequence[Cut]) -> tuple[Timeline, str] | None:
    """Return the schedule in the cache and its origin; None where it fits none of ``cuts``."""
    stored = cache.load(name)
    if stored is None:
        return None
    schedule, origin = stored
    for cut in cuts:
        if (cut.placement, cut.microbatches) == (schedule.placement, schedule.microbatches):
            timeline = simulate(schedule, cut.costs)
            if cut.keeps(timeline):
                return timeline, origin
    return None


def _shortest(cuts: Sequence[Cut], trials: int) -> tuple[Timeline, str]:
    """Return the shortest proposal of the portfolio and its origin; of equally long ones the first.

    The methods compare orders by integer makespan, which may be off by rounding.  So the proposals within
    ``CLOSE`` of the best are simulated and compared again.
    """
    # Imported here because it takes numba a second, which nobody needs who compiles nothing.
    from megatron_pp_ext.compiler.search.proposals import CLOSE, Proposal, Proposer

    proposers = [Proposer(cut) for cut in cuts]
    proposals: list[Proposal] = []
    for proposer in proposers:
        proposals += proposer.from_families()
    # The most promising placement comes first: its result may make a search of the others unnecessary.
    for proposer in sorted(proposers, key=lambda proposer: proposer.bound):
        shortest = min(proposal.makespan for proposal in proposals)
        can_be_shorter = proposer.bound < shortest * (1 - TOLERANCE)
        if trials and can_be_shorter and not _is_dominated(proposer.cut.placement, cuts):
            proposals += proposer.from_search(trials)

    shortest = min(proposal.makespan for proposal in proposals)
    best: tuple[Timeline, str] | None = None
    firsts: dict[float, Proposal] = {}
    for proposal in proposals:
        firsts.setdefault(proposal.makespan, proposal)
    for length, proposal in firsts.items():
        if length <= shortest * (1 + CLOSE):
            timeline = proposal.timeline
            if not proposal.cut.keeps(timeline):
                raise AssertionError(f"{proposal.origin} breaks the limit it was made for")
            if best is None or timeline.makespan < best[0].makespan * (1 - TOLERANCE):
                best = timeline, f"{proposal.origin}, {proposal.cut.placement.shape} placement"
    assert best is not None
    return best


def _with_features(searched: tuple[Timeline, str], cuts: Sequence[Cut]) -> tuple[Timeline, str]:
    """Return the shortest of ``searched`` and the orders of features that keep the limits."""
    best, origin = searched
    for feature in FEATURES:
        for timeline, by in feature.compiled(*searched, cuts):
            if cuts[0].keeps(timeline) and timeline.makespan < best.makespan * (1 - TOLERANCE):
                best, origin = timeline, by
    return best, origin


def _is_dominated(placement: Placement, cuts: Sequence[Cut]) -> bool:
    """Whether the search skips ``placement``, as another of ``cuts`` with as many chunks is better.

    A placement that turns round at the last rank has fewer messages between ranks than one that jumps back to
    the first, and its ranks need equal memory, which a loop's do not.
    """
    turns = {cut.placement.chunks for cut in cuts if cut.placement.shape is not Shape.LOOP}
    return placement.shape is Shape.LOOP and placement.chunks in turns
