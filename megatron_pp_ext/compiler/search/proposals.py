"""Propose orders for a pipeline, from the published families or from a search, that keep its limits.

A limit has to hold messages in addition to activations.  How many messages a rank holds follows from the
complete orders of all ranks, so no search can count them on its way.  A search is given limits that leave
memory for messages, and its results are then judged with their own number of messages.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megatron_pp_ext.compiler.limits import Cut, at_most, least_limits
from megatron_pp_ext.compiler.search.integer_timing import time_orders
from megatron_pp_ext.compiler.search.portfolio import search
from megatron_pp_ext.compiler.search.problem import TOLERANCE, Orders, Problem
from megatron_pp_ext.compiler.search.progress_log import ProgressLog
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.names import FLEX
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import Timeline, simulate

CLOSE = 1e-6
"""The largest relative difference of two makespans that rounding to integer time may reverse."""

Start = tuple[Orders, str]
"""Orders and where they come from."""

_ATTEMPTS = 3
"""The number of times that a search may run, with more memory left for messages each time."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Orders within the limits of ``cut``, and their makespan in the units of the costs, up to rounding."""

    makespan: float
    problem: Problem
    orders: Orders
    cut: Cut
    origin: str

    @property
    def timeline(self) -> Timeline:
        """The proposal as a simulated schedule."""
        return simulate(self.problem.schedule(self.orders, FLEX), self.cut.costs)

    @property
    def is_kept(self) -> bool:
        """Whether the limits, which hold the activations, hold the messages as well."""
        return not self.cut.costs.message or self.cut.keeps(self.timeline)


class Proposer:
    """Proposes orders for ``cut``, of which none is shorter than ``bound``."""

    def __init__(self, cut: Cut) -> None:
        self.cut, self.bound = cut, cut.bound()
        self._problem = cut.problem(cut.room)
        self._families = families_of(self._problem)

    def from_families(self) -> list[Proposal]:
        """Return the shortest families that keep the limits, or else the order that always does."""
        families = [start for start in self._families if self._problem.fits(start[0])]
        alone = [(one_at_a_time(self._problem), "one microbatch at a time")]
        return _shortest(self._timed(families)) or [*self._timed(alone)]

    def _timed(self, starts: Iterable[Start]) -> Iterator[Proposal]:
        problem = self._problem
        for orders, origin in starts:
            timed = time_orders(problem, orders)
            if timed is not None:
                yield Proposal(timed.makespan / problem.scale, problem, orders, self.cut, origin)

    def from_search(self, trials: int) -> list[Proposal]:
        """Return the shortest results of a search that keep the limits.

        A search ends with the first of its results that meets the bound and keeps the limits.  It may use
        the memory that the fewest possible messages leave.  Where the best result has more messages, and
        they do not fit, the search begins anew with memory for that many.
        """
        cut, problem, budgets = self.cut, self._problem, self.cut.room
        least_activations = least_limits(replace(cut.costs, message=0.0), cut.placement)
        floor = math.ceil(self.bound * problem.scale * (1 - TOLERANCE))
        proposals: list[Proposal] = []
        progress_log = ProgressLog(problem, cut.limits, self.bound)
        for _ in range(_ATTEMPTS):
            results = []
            for length, orders, origin in search(problem, trials, floor, self._families):
                results.append(Proposal(length / problem.scale, problem, orders, cut, origin))
                progress_log.found(results[-1].makespan)
                if length <= floor and results[-1].is_kept:
                    break
            shortest = _shortest(results)
            proposals += shortest
            best = min(results, key=lambda proposal: proposal.makespan, default=None)
            if best is None or any(proposal is best for proposal in shortest):
                break
            timeline = best.timeline
            by_rank = zip(
                cut.limits,
                timeline.peak_messages,
                timeline.peak_memory,
                budgets,
                least_activations,
                strict=True,
            )
            # A rank that keeps no activations cannot free memory by keeping fewer.
            less = tuple(
                budget if at_most(peak, limit) else max(least or budget, limit - messages * cut.costs.message)
                for limit, messages, peak, budget, least in by_rank
            )
            if less == budgets:
                break
            budgets = less
            problem = cut.problem(budgets)
        progress_log.end()
        return proposals


def families_of(problem: Problem) -> list[Start]:
    """Return the published orders that ``problem`` has, whether or not they keep its limits."""
    return [
        (problem.orders(schedule), f"published {schedule.name}")
        for schedule in published(problem.placement, problem.microbatches)
    ]


def published(placement: Placement, microbatches: int) -> Iterator[Schedule]:
    """Yield every schedule of the catalogue that has this very placement, in the catalogue's order.

    They are not checked: on large pipelines that takes longer than all the rest, and the compiler
    checks its winner.
    """
    for entry in catalog.ENTRIES.values():
        if entry.shape is placement.shape and entry.accepts(placement.chunks):
            try:
                yield entry.build(placement.ranks, microbatches, placement.chunks)
            except ValueError:  # it has no schedule for these sizes
                continue


def _shortest(proposals: Iterable[Proposal]) -> list[Proposal]:
    """Return the ``proposals`` that keep the limits and are ``CLOSE`` to the shortest of these, in order.

    They are judged from the shortest on, since counting messages takes longer than most of a search.
    """
    chosen: dict[int, Proposal] = {}
    for at, proposal in sorted(enumerate(proposals), key=lambda item: item[1].makespan):
        if chosen and proposal.makespan > next(iter(chosen.values())).makespan * (1 + CLOSE):
            break
        if proposal.is_kept:
            chosen[at] = proposal
    return [chosen[at] for at in sorted(chosen)]


def one_at_a_time(problem: Problem) -> Orders:
    """Return the orders that fit wherever any do: a microbatch starts when the one before has ended.

    Backwards are whole only where an I takes more memory than they do, and more than there is.
    """
    split, least = (_one_at_a_time(problem, are_split) for are_split in (True, False))
    return split if problem.fits(split) else least


def _one_at_a_time(problem: Problem, are_split: bool) -> Orders:
    """Return the orders whose backwards all ``are_split``, or each in the way that takes less memory."""
    stages = problem.placement.stages
    orders: Orders = [[] for _ in range(problem.placement.ranks)]
    for _ in range(problem.microbatches):
        for station in range(problem.stations):
            codes = [station]
            if station >= stages:
                weight = problem.weight_of(station)
                is_split = are_split or problem.growth[station] <= problem.growth[weight + stages]
                codes = [station, weight] if is_split else [weight + stages]
            orders[problem.home[station]] += codes
    return orders
