"""Proposes orders for a pipeline, from the published families or from a search, that keep its limits."""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random

from megatron_pp_ext.compiler.bounds import Cut
from megatron_pp_ext.compiler.limits import TOLERANCE, at_most, least_limits
from megatron_pp_ext.compiler.search.annealing import anneal
from megatron_pp_ext.compiler.search.list_scheduling import list_schedule
from megatron_pp_ext.compiler.search.problem import Orders, Problem
from megatron_pp_ext.compiler.search.tables import time_orders
from megatron_pp_ext.compiler.search.tune import best, improve, tune
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.entry import FLEX
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import Timeline, simulate

_LOG = logging.getLogger(__name__)

_PAUSE_SECONDS = 10.0
"""The least time between two lines about how far a search is."""


class ProgressLog:
    """The lines of one search of ``problem`` within ``limits``; no makespan is below ``bound``.

    Nothing that a search finds depends on the clock, which is read for these lines alone.
    """

    def __init__(self, problem: Problem, limits: Sequence[float], bound: float) -> None:
        placement = problem.placement
        least, most = min(limits), max(limits)
        limit = f"limit {most:.4g}" if least == most else f"limits from {least:.4g} to {most:.4g}"
        self._what = (
            f"a schedule for p = {placement.ranks}, m = {problem.microbatches}, {placement.shape} placement, "
            f"{limit}"
        )
        self._bound = bound
        self._shortest = math.inf
        self._begin = self._latest = time.monotonic()
        _LOG.info(f"compiling {self._what}")

    def record(self, makespan: float) -> None:
        """Note one result, and log how far the search is if it has not for a while."""
        self._shortest = min(self._shortest, makespan)
        now = time.monotonic()
        if now - self._latest >= _PAUSE_SECONDS:
            self._latest = now
            _LOG.info(f"compiling {self._what}: so far {self._above()} after {now - self._begin:.0f} s")

    def end(self) -> None:
        """Log how good the best result is and how long the search took."""
        seconds = time.monotonic() - self._begin
        _LOG.info(f"compiled {self._what}, in {seconds:.1f} s, {self._above()}")

    def _above(self) -> str:
        if self._shortest == math.inf:
            return "none found"
        return f"{max(0.0, self._shortest / self._bound - 1):.1%} above its lower bound"


Found = tuple[int, Orders, str]
"""A makespan, the orders that have it, and where they come from."""

_LISTED = 12_288
"""Actions that the list schedules of one trial have together."""

_SMALL = 512
"""A pipeline with fewer actions has no more list schedules than one with so many."""

_SHORT = 768
"""The fewest actions of a pipeline that is shortened."""

_ROUND = 1000
"""List schedules of one fresh start.  In one of four the legs of a wave may have pauses of their own."""

_MOVES = 7150
"""Moves of annealing for each trial, on a small pipeline; for every 16 actions there is one more."""

_MOST_MOVES = 9000
"""The most moves for each trial."""

_TURNS = ((4, 1), (2, 1), (1, 6))
"""How many orders compete in each round of annealing, and how many eighths of the moves they share.

One long walk finds more than several short ones, and where it begins matters little.
"""

_AGAIN = ((1, 6), (1, 6), (1, 6))
"""Turns after these on pipelines of fewer than ``_FEW`` actions, where a move takes the least time.

The walks of one small pipeline end up to half a percent apart.
"""

_FEW = 256

_CHANCE = 20
"""An order that is longer than the shortest one by more than one part in so many is left out.

On large pipelines all list schedules are often much longer than the published orders.
"""


def search(
    problem: Problem, trials: int, floor: int, starts: Sequence[tuple[Orders, str]]
) -> Iterator[Found]:
    """Yield the makespan, orders and origin of each result of ``trials`` trials; all keep the limits.

    ``starts`` are orders with their origins, which may have whole backwards and break the limits.  ``floor``
    is a lower bound on the makespan, at which annealing ends.  A caller may stop iterating at any time.

    List scheduling looks for building blocks on a pipeline with few microbatches, on which many can be tried.
    The best blocks are carried over to the full number of microbatches and adapted once more.  What results,
    and the published orders, then compete in annealing: the better ones get a share of the moves, the best of
    these another, and the very best the rest.  A trial on a larger pipeline takes longer, so there are fewer
    of them; their number depends on sizes alone, never on a clock.
    """
    pool: list[Found] = []
    for result in chain(_known(problem, starts), _listed(problem, trials)):
        yield result
        pool.append(result)
    moves = trials * min(_MOST_MOVES, _MOVES + problem.size // 16)
    turns = (*_TURNS, *_AGAIN) if problem.size < _FEW else _TURNS
    for turn, (rivals, eighths) in enumerate(turns):
        pool = sorted(pool, key=lambda result: result[0])[:rivals]
        pool = [result for result in pool if result[0] * _CHANCE <= pool[0][0] * (_CHANCE + 1)]
        for at, (_, orders, origin) in enumerate(pool):
            share = moves * eighths // (8 * len(pool))
            annealed = f"{origin}, annealed" if turn == 0 else origin
            pool[at] = (*anneal(problem, orders, share, len(_TURNS) * at + turn, floor), annealed)
            yield pool[at]


def _known(problem: Problem, starts: Sequence[tuple[Orders, str]]) -> Iterator[Found]:
    """Yield the ``starts`` that keep the limits, with their backwards split."""
    for orders, origin in starts:
        split = problem.split(orders)
        timed = time_orders(problem, split) if problem.fits(split) else None
        if timed is not None:
            yield timed.makespan, split, origin


def _listed(problem: Problem, trials: int) -> Iterator[Found]:
    """Yield the best list schedules of every fresh start."""
    fewest = max(2 * problem.placement.ranks, _SHORT // (3 * problem.placement.stages))
    short = problem.shortened(min(problem.microbatches, fewest))
    lists = _lists(trials, short)
    for number in range(max(1, lists // _ROUND)):
        random = Random(f"{problem.placement.ranks}/{problem.microbatches}/{number}")
        each_leg = problem.placement.chunks > 2 and number % 4 == 1
        plans = tune(short, min(lists, _ROUND), random, each_leg=each_leg)
        if short.microbatches < problem.microbatches:
            plans = best(problem, [plan for _, plan in plans])
            if plans:
                plans[0] = improve(problem, plans[0], min(_lists(trials, problem), _ROUND) // 4, random)
        for _, plan in plans:
            done = list_schedule(problem, plan.knobs(problem))
            if done is not None:
                yield *done, "list scheduling"


def _lists(trials: int, problem: Problem) -> int:
    """Return how many list schedules ``trials`` trials have on a pipeline of this size."""
    return trials * _LISTED // max(_SMALL, problem.size)


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
    """Proposes orders for ``cut``, of which none is shorter than ``bound``.

    A limit has to hold messages in addition to activations.  How many messages a rank holds follows from the
    complete orders of all ranks, so no search can count them on its way.  A search is given limits that leave
    memory for messages, and its results are then judged with their own number of messages.
    """

    def __init__(self, cut: Cut) -> None:
        self.cut, self.bound = cut, cut.bound()
        self._problem = problem = cut.problem(cut.room)
        self._families: list[Start] = [
            (problem.orders(schedule), f"published {schedule.name}")
            for schedule in published(problem.placement, problem.microbatches)
        ]

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
                progress_log.record(results[-1].makespan)
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
