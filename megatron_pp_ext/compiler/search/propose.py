"""Orders that are proposed for a pipeline, and whether its limits allow them.

A limit has to hold messages beside activations.  How many a rank holds follows from the orders of all
ranks, so no search can count them on its way: it gets limits with room left for messages, and what it
finds is judged with its own.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_pp_ext.compiler.limits import at_most, least_limits, rooms_beside_messages
from megatron_pp_ext.compiler.search.evaluate import run
from megatron_pp_ext.compiler.search.portfolio import search
from megatron_pp_ext.compiler.search.problem import TOLERANCE, Orders, Problem, problem_of
from megatron_pp_ext.compiler.search.published import published
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import Timeline, simulate

_ATTEMPTS = 3
"""How often a search may begin anew, with more room left for messages each time."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Orders within the limits, and their makespan in the units of the costs, up to rounding."""

    makespan: float
    problem: Problem
    orders: Orders
    costs: Costs
    origin: str

    @property
    def timeline(self) -> Timeline:
        """It, simulated."""
        return simulate(self.problem.schedule(self.orders, "flex"), self.costs)


def from_families(problem: Problem, costs: Costs, limits: Sequence[float]) -> list[Proposal]:
    """The published families that keep the limits, or where there is none, the order that always does."""
    families = (
        (orders, f"published {schedule.name}")
        for schedule in published(problem.placement, problem.microbatches)
        if (orders := problem.orders(schedule)) is not None and problem.fits(orders)
    )
    kept = [one for one in _timed(problem, costs, families) if _keeps(one, limits)]
    return kept or [*_timed(problem, costs, [(one_at_a_time(problem), "one microbatch at a time")])]


def _timed(problem: Problem, costs: Costs, found: Iterable[tuple[Orders, str]]) -> Iterator[Proposal]:
    for orders, origin in found:
        timed = run(problem, orders)
        if timed is not None:
            yield Proposal(timed.makespan / problem.scale, problem, orders, costs, origin)


def from_search(
    problem: Problem, costs: Costs, limits: Sequence[float], trials: int, bound: float
) -> list[Proposal]:
    """What a search of ``problem`` finds and ``limits`` allow; no makespan is below ``bound``.

    The search has the room beside the fewest messages that there can be.  Where the best that it finds has
    more, and they do not fit in, it begins anew with room for that many.
    """
    placement, microbatches = problem.placement, problem.microbatches
    rooms = rooms_beside_messages(placement, microbatches, costs, limits)
    needed = least_limits(placement.ranks, replace(costs, message=0.0), placement)
    floor = math.ceil(bound * problem.scale * (1 - TOLERANCE))
    kept: list[Proposal] = []
    for _ in range(_ATTEMPTS):
        found = [
            Proposal(length / problem.scale, problem, orders, costs, origin)
            for length, orders, origin in search(problem, trials, floor)
        ]
        kept += [one for one in found if _keeps(one, limits)]
        best = min(found, key=lambda one: one.makespan, default=None)
        if best is None or _keeps(best, limits):
            break
        timeline = best.timeline
        beside = zip(limits, timeline.peak_messages, timeline.peak_memory, rooms, needed, strict=True)
        # A rank that keeps no activations has nothing to give up.
        less = tuple(
            room if at_most(peak, limit) else max(least or room, limit - messages * costs.message)
            for limit, messages, peak, room, least in beside
        )
        if less == rooms:
            break
        rooms = less
        problem = problem_of(placement, microbatches, costs, rooms)
    return kept


def _keeps(proposal: Proposal, limits: Sequence[float]) -> bool:
    """Whether ``limits`` hold the messages of ``proposal`` too, whose activations they hold."""
    return not proposal.costs.message or all(map(at_most, proposal.timeline.peak_memory, limits))


def one_at_a_time(problem: Problem) -> Orders:
    """The orders that fit wherever any do: a microbatch starts when the one before has ended."""
    orders: Orders = [[] for _ in range(problem.placement.ranks)]
    for _ in range(problem.microbatches):
        for station in range(problem.stations):
            orders[problem.home[station]].append(station)
            if station >= problem.placement.stages:
                orders[problem.home[station]].append(problem.weight_of(station))
    return orders
