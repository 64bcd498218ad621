"""The shortest step within a limit below the least peak of any order: activations wait on the host.

An order in which weight gradients wait fills its bubbles with them, but the operands of a W are on the device
all the while, where no copy helps.  So the orders of the published families are tried with fewer and fewer of
them waiting, on the ranks that are above their limit, until copies that take no time (``free_plans``) keep it
or, at last, ranks wait for copies (``longer_plans``).

A plan of copies takes longer than all else.  No copies make a step shorter than its order alone, so the
order that is shortest alone is planned first, and none that is no shorter than what was found.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import heappop, heappush

from megatron_pp_ext.compiler.compile import kept
from megatron_pp_ext.compiler.search import cache
from megatron_pp_ext.compiler.turns import in_turn
from megatron_pp_ext.features.offload.free_plans import least_copies, timed
from megatron_pp_ext.features.offload.longer_plans import within_limits
from megatron_pp_ext.features.offload.rank_copies import ROUNDING
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.check import InvalidSchedule, check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import Timeline, simulate

VERSION = 1
"""Raised with every change that lets the same inputs give another plan, so that no cached one is used."""

type _Tried = tuple[float, int, list[int], Timeline]
"""A makespan alone, the order's number, how many weight gradients wait on each rank, and the step alone."""


def published_orders(placements: Sequence[Placement], microbatches: int) -> list[Schedule]:
    """Return the orders of all published families with one of ``placements``."""
    from megatron_pp_ext.compiler.search.proposals import published  # numpy takes a while

    return [schedule for placement in placements for schedule in published(placement, microbatches)]


def planned(
    placements: Sequence[Placement], microbatches: int, costs: Costs, limits: Sequence[float]
) -> Timeline | None:
    """Return ``shortest_within`` of all published orders; one process of a machine plans, the others read."""
    cuts = [(placement, costs.merged(placement.stages)) for placement in placements]
    spelled = [cache.spelled(*cut) for cut in cuts]
    name = cache.key(["copies", VERSION, catalog.NAMES, microbatches, limits, spelled])

    def read() -> Timeline | None:
        step = kept(name, cuts, microbatches, limits)
        return step and step[0]

    def made() -> Timeline | None:
        step = shortest_within(published_orders(placements, microbatches), costs, limits)
        if step is not None:
            check(step.schedule)
            cache.store(name, step.schedule, step.schedule.name)
        return step

    return cache.in_cache(name, in_turn, read, made)


def shortest_within(schedules: Sequence[Schedule], costs: Costs, limits: Sequence[float]) -> Timeline | None:
    """Return the shortest step with copies that keeps ``limits``, in one of the orders of ``schedules``.

    ``costs`` are of the finest cut, with the seconds of copies (``StageCosts.copy``), and ``limits``
    are in the unit of their activations.  None where no order keeps the limits.
    """
    heap: list[_Tried] = []

    def add(number: int, waiting: list[int]) -> None:
        """Put an order into the heap, unless its ranks would wait for each other."""
        schedule = schedules[number]
        hurried = replace(schedule, orders=tuple(map(_hurried, schedule.orders, waiting)))
        with suppress(InvalidSchedule):
            step = simulate(hurried, costs.merged(schedule.placement.stages))
            heappush(heap, (step.makespan, number, waiting, step))

    for number, schedule in enumerate(schedules):
        cut = costs.merged(schedule.placement.stages)
        most = [
            _most_waiting(order, cut, limit) for order, limit in zip(schedule.orders, limits, strict=True)
        ]
        if None not in most:
            add(number, [count for count in most if count is not None])
    best: Timeline | None = None
    while heap and (best is None or heap[0][0] < best.makespan):
        _, number, waiting, step = heappop(heap)
        copies, above = least_copies(step, limits)
        fewer = [count - (rank in above and count > 1) for rank, count in enumerate(waiting)]
        if fewer != waiting:
            add(number, fewer)
            continue
        candidate = within_limits(step.schedule, step.costs, limits) if above else timed(step, copies)
        best = min(filter(None, (best, candidate)), key=lambda timeline: timeline.makespan, default=None)
    return best


def _most_waiting(order: Sequence[Action], costs: Costs, limit: float) -> int | None:
    """Return how many weight gradients may wait for any copies to keep ``limit``; None if none may."""
    most = max(_waiting(order))
    fewest = min(most, 1)
    counts = range(fewest, most + 1)
    # Fewer that wait hardly ever need more, so that the first of too many is found by halving.
    keeping = bisect_right(
        counts, limit * (1 + ROUNDING), key=lambda count: _least_kept(_hurried(order, count), costs)
    )
    return counts[keeping - 1] if keeping else None


def _least_kept(order: Sequence[Action], costs: Costs) -> float:
    """Return the least bytes of a rank under any copies: of the action that runs, and for each W to come."""
    waiting = most = 0.0
    for stage, kind, _ in order:
        if kind is Kind.W:
            waiting += costs.stages[stage].kept(kind)
            continue
        during = 0.0 if kind is Kind.F else costs.stages[stage].growth(kind)
        most = max(most, waiting + costs.stages[stage].activation + during)
        if kind is Kind.I:
            waiting -= costs.stages[stage].kept(Kind.W)
    return most


def _waiting(order: Sequence[Action]) -> Iterator[int]:
    """Yield how many weight gradients wait after each action."""
    count = 0
    for action in order:
        count += (action.kind is Kind.I) - (action.kind is Kind.W)
        yield count


def _hurried(order: Sequence[Action], most: int) -> tuple[Action, ...]:
    """Return ``order`` with weight gradients earlier, so that at most ``most`` wait, the oldest first."""
    waiting: list[Action] = []
    actions = []
    for action in order:
        stage, kind, microbatch = action
        if kind is Kind.W:
            if action in waiting:
                waiting.remove(action)
                actions.append(action)
            continue
        if kind is Kind.I:
            while len(waiting) >= most:
                actions.append(waiting.pop(0))
            waiting.append(Action(stage, Kind.W, microbatch))
        actions.append(action)
    return tuple(actions)
