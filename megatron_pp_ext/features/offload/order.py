"""The pass of --pipeline-offload: the copies of activations to the host that a requested schedule gets.

All ranks plan them from the same costs, so that they agree without a message.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from megatron_pp_ext.compiler import cache
from megatron_pp_ext.compiler.bounds import Cut
from megatron_pp_ext.compiler.cache import in_turn
from megatron_pp_ext.compiler.compile import from_cache, least_makespan
from megatron_pp_ext.compiler.limits import TOLERANCE, InfeasibleLimit
from megatron_pp_ext.compiler.make import Made, Make
from megatron_pp_ext.compiler.request import Option, Request
from megatron_pp_ext.features.offload.copies import (
    ROUNDING,
    least_copies,
    timed,
    with_share,
    with_whole_share,
    within,
    within_limits,
    without_copies,
)
from megatron_pp_ext.job import pipeline
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.check import InvalidSchedule, check
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.entry import AUTO, FLEX
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from megatron_pp_ext.setting_error import SettingError


@dataclass(frozen=True, slots=True)
class OffloadRequest(Option):
    """The request for activations that wait on the host.

    ``share`` is the part of all activations, above 0 and at most 1, or ``auto``: as few as keep the memory
    limit, and without one as many as cost no time.  ``host_bytes`` are those of the host that the activations
    of a rank may take, None for its part of half of what is free.
    """

    share: float | str
    host_bytes: float | None = None


def with_offload(
    request: Request,
    value: float | str,
    limit: float | str | None,
    limit_names: pipeline.Names = pipeline.BY_FLAG,
    host_bytes: float | None = None,
) -> Request:
    """Return ``request`` with the flag's ``value``, and with the ``limit`` that copies have to keep.

    ValueError, in one line, for a share that is not above 0 and at most 1.
    """
    if value == AUTO:
        if limit is not None and request.limit is None:
            request = replace(request, limit=pipeline.read_limit(limit, request.ranks, limit_names))
        return request.with_option(OffloadRequest(AUTO, host_bytes))
    try:
        share = 0.0 if isinstance(value, bool) else float(value or 0)
    except (TypeError, ValueError):
        share = 0.0
    if not 0 < share <= 1:
        raise SettingError(
            f"--pipeline-offload is {value}, but must be a share above 0 and at most 1, or {AUTO}; give one, "
            "such as 0.5"
        )
    return request.with_option(OffloadRequest(share, host_bytes))


def of_call(request: Request, value: float | str, limit: float | str | None) -> Request:
    """Return ``request`` with what the argument ``offload`` of ``install`` asks for."""
    return with_offload(request, value, limit, pipeline.BY_CALL)


VERSION = 1
"""Raised with every change that lets the same inputs give another plan, so that no cached one is used."""

type _Tried = tuple[float, int, list[int], Timeline]
"""A makespan alone, the order's number, how many weight gradients wait on each rank, and the step alone."""


def published_orders(placements: Sequence[Placement], microbatches: int) -> list[Schedule]:
    """Return the orders of all published families with one of ``placements``."""
    from megatron_pp_ext.compiler.search.proposals import published  # numpy takes a while

    return [schedule for placement in placements for schedule in published(placement, microbatches)]


def planned(
    placements: Sequence[Placement], microbatches: int, costs: Costs, limits: tuple[float, ...]
) -> Timeline | None:
    """Return ``shortest_within`` of all published orders; one process of a machine plans, the others read."""
    cuts = Cut.all_of(placements, microbatches, costs, limits)
    spelled = [cache.spelled(cut.placement, cut.costs) for cut in cuts]
    name = cache.key(["copies", VERSION, catalog.NAMES, microbatches, limits, spelled])

    def read() -> Timeline | None:
        step = from_cache(name, cuts)
        return step and step[0]

    def plan() -> Timeline | None:
        step = shortest_within(published_orders(placements, microbatches), costs, limits)
        if step is not None:
            check(step.schedule)
            cache.store(name, step.schedule, step.schedule.name)
        return step

    return cache.in_cache(name, in_turn, read, plan)


def shortest_within(schedules: Sequence[Schedule], costs: Costs, limits: Sequence[float]) -> Timeline | None:
    """Return the shortest step with copies that keeps ``limits``, in one of the orders of ``schedules``.

    ``costs`` are of the finest cut, with the seconds of copies (``StageCosts.copy``), and ``limits``
    are in the unit of their activations.  None where no order keeps the limits.

    An order in which weight gradients wait fills its bubbles with them, but the operands of a W are on the
    device all the while, where no copy helps.  So the orders of the published families are tried with fewer
    and fewer of them waiting, on the ranks that are above their limit, until copies that take no time keep it
    or, at last, ranks wait for copies.

    A plan of copies takes longer than all else.  No copies make a step shorter than its order alone, so the
    order that is shortest alone is planned first, and none that is no shorter than what was found.
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


HOST_LINK = 25e9
"""The bytes a second, each way, for an unknown machine: PCIe 4 x16."""

PART_OF_FORWARD = 0.5
"""The part of a forward that a copy counts as where it is not known how many bytes a stage keeps."""

_FEWER = 8
"""The part of the trials that is left for an order without copies, which has to be shorter than one with."""

_WORTH_SAYING = 5e-4
"""The part of a step from which on it is reported that copies make it longer."""


def offloaded(request: Request, option: OffloadRequest, costs: CostModel, before: Make) -> Made:
    """Let activations wait on the host, as the ``option`` of the request asks.

    ValueError, in one line, where no copies keep the memory limit.
    """
    if option.share == AUTO and request.is_compiled:
        return _compiled(request, costs, before)
    result = before(request)
    copy_costs = with_copy_seconds(_known(request, costs, result.schedule))
    alone = without_copies(result.schedule, copy_costs)
    timeline = _timeline(result.schedule, request, option.share, copy_costs)
    growth = timeline.makespan / alone.makespan - 1
    note = f"copies to the host make steps {growth:.1%} longer by the estimate"
    notes = "; ".join(filter(None, (result.note, note if growth > _WORTH_SAYING else "")))
    return replace(result, schedule=timeline.schedule, note=notes)


def with_copy_seconds(costs: Costs) -> Costs:
    """Return ``costs`` with the seconds of copies, where a file has not given them.

    Costs that count the weights of stages count activations in bytes, too, and those go over ``HOST_LINK``.
    In others a copy takes ``PART_OF_FORWARD``.
    """
    if any(stage.copy for stage in costs.stages):
        return costs
    if costs.has_parameters:
        return costs.copied_at(1 / HOST_LINK)
    stages = (replace(stage, copy=PART_OF_FORWARD * stage.forward) for stage in costs.stages)
    return replace(costs, stages=tuple(stages))


def _known(request: Request, costs: CostModel, schedule: Schedule) -> Costs:
    """Return the costs of the stages of ``schedule``; those of units for a model that has no estimate."""
    placement = schedule.placement
    try:
        return costs.of(placement)
    except ValueError:
        return Costs.unit(placement)


def _timeline(schedule: Schedule, request: Request, share: float | str, costs: Costs) -> Timeline:
    if share != AUTO:
        return with_whole_share(schedule, costs, float(share))
    if request.limit is None:
        return with_share(schedule, costs, 1.0)
    budget = request.budget(costs)
    timeline = within_limits(schedule, budget.counted(costs), budget.ranks)
    if timeline is not None:
        return timeline
    peaks = within(schedule, budget.counted(costs), budget.ranks).peak_memory
    rank = max(range(request.ranks), key=lambda rank: peaks[rank] - budget.ranks[rank])
    raise InfeasibleLimit(
        f"memory limit: rank {{rank}} may keep {budget.ranks[rank]:.4g}, but keeps {peaks[rank]:.4g} "
        f"under {schedule.name} with all on the host that comes back in time; raise it, or choose flex",
        rank,
    )


def _compiled(request: Request, costs: CostModel, before: Make) -> Made:
    """Return the shortest step found within the limit where activations may wait on the host.

    The order compiled without copies stays if nothing is shorter.  Where a published family keeps the limit
    with copies, fewer trials search for it, and none where its lower bound is above that family's step.
    """
    all_costs = with_copy_seconds(costs.of(request.finest))
    budget = request.budget(all_costs)
    counted_costs = budget.counted(all_costs)
    step = planned(request.placements, request.microbatches, counted_costs, budget.ranks)
    trials = request.trials if step is None else request.trials // _FEWER
    if step is None:
        return Made(before(replace(request, trials=trials)).schedule)
    result = Made(replace(step.schedule, name=FLEX))
    least = least_makespan(request.placements, request.microbatches, counted_costs, budget.ranks)
    if least > step.makespan * (1 + TOLERANCE):
        return result
    with suppress(InfeasibleLimit):
        alone = before(replace(request, trials=trials))
        stages = alone.schedule.placement.stages
        if simulate(alone.schedule, counted_costs.merged(stages)).makespan <= step.makespan:
            return Made(alone.schedule)
    return result
