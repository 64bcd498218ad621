"""Lower bounds on the makespan of any schedule under a memory limit.

There are five arguments, each about one rank at a time; the bound of a placement is the largest of them.

path    One microbatch goes through all stages and back, and its last W follows.
work    A rank does all its F, I and W one after the other, and the first microbatch has to reach it.
window  Until the first gradient reaches a rank it can only do F, and no more than memory holds.
        After its last F it can only do I and W of microbatches that it keeps, while the last microbatch
        goes on to the end and comes back.  The rank is idle for the rest of these two times.
memory  Little's law: a microbatch keeps a stage's activations at least as long as its way from F to
        the end of I, and W after it.  All microbatches together cannot keep more than the limit times
        the makespan, less the part of the limit that the rank cannot use while it fills up and runs empty.
turns   A microbatch that is on its way after a stage keeps the rank's activations of it up to this stage, for
        a V's last rank two.  So only some can be there at once, and the others wait for their
        turn; where the limit is a multiple of what each keeps, until all W before them have run.

The arguments hold for any order, with split or whole backwards; a whole backward keeps activations longer.
An I may have a W inside, which hides ``StageCosts.hidden`` of it: what both take in all is counted so.
A head that is split over the ranks adds to the path and to the work.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from megatron_pp_ext.compiler.limits import at_most, least_limits, without_messages
from megatron_pp_ext.compiler.search.problem import Problem, problem_of
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts, UnitCosts
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import Timeline


@dataclass(frozen=True)
class Cut:
    """Stages for which orders are compiled: where they are, what they cost, and the limits of the ranks."""

    placement: Placement
    microbatches: int
    costs: Costs
    limits: tuple[float, ...]

    @classmethod
    def all_of(
        cls, placements: Iterable[Placement], microbatches: int, costs: Costs, limits: tuple[float, ...]
    ) -> list[Self]:
        """Return the cuts by ``placements`` of stages whose finest ones have ``costs``."""
        return [cls(where, microbatches, costs.merged(where.stages), limits) for where in placements]

    @cached_property
    def least(self) -> tuple[float, ...]:
        """What each rank must keep in every order."""
        return least_limits(self.costs, self.placement, self.microbatches)

    @property
    def is_feasible(self) -> bool:
        """Whether an order keeps the limits."""
        return all(map(at_most, self.least, self.limits))

    @cached_property
    def room(self) -> tuple[float, ...]:
        """What messages leave of each limit for activations at most."""
        return without_messages(self.placement, self.microbatches, self.costs, self.limits)

    def keeps(self, timeline: Timeline) -> bool:
        """Whether a step keeps the limits."""
        return all(map(at_most, timeline.peak_memory, self.limits))

    def bound(self, paired: bool = False) -> float:
        """Return a makespan below which there is no order, of those in pairs neither if ``paired``."""
        return lower_bound(self.placement, self.microbatches, self.costs, self.room, paired=paired)

    def problem(self, room: Sequence[float]) -> Problem:
        """Return the problem in whole numbers in which activations have ``room``."""
        return problem_of(self.placement, self.microbatches, self.costs, room)


def lower_bound(
    placement: Placement, microbatches: int, costs: Costs, limits: Sequence[float], paired: bool = False
) -> float:
    """Return a makespan below which no schedule with this placement can be, in the units of ``costs``.

    ``costs`` are for the stages of ``placement``; ``limits`` are one amount of activations for each rank.
    With ``paired`` the schedule may have pairs.  Where microbatches have costs of their own, only the
    arguments of path and work are used.
    """
    if not costs.are_alike:
        return _of_units(placement, costs, paired)
    if paired:
        costs = costs.at_their_shortest
    route = _Route(placement, costs)
    bounds = [route.path]
    shared = costs.head if placement.splits_head else None
    part = shared.scores + shared.weight_gradient if shared else 0.0
    for rank, limit in enumerate(limits):
        stages = placement.stages_of(rank)
        stage_costs = [costs.stages[stage] for stage in stages]
        head = route.starts[stages[0]]
        work = sum(cost.forward + cost.seconds(Kind.B) for cost in stage_costs)
        bounds.append(head + microbatches * (work + part))
        bounds.append(_window(route, stages, stage_costs, microbatches, limit))
        bounds.append(head + _memory(route, stages, stage_costs, microbatches, limit))
        bounds += _turns(route, stages, stage_costs, microbatches, limit)
    return max(bounds)


def _of_units(placement: Placement, costs: Costs, paired: bool) -> float:
    """Return the bound for the microbatches of ``costs``, whose first one may be any of them."""
    assert isinstance(costs, UnitCosts)
    units = [replace(unit, hop=costs.hop, pair=costs.pair) for unit in costs.units]
    if paired:
        units = [unit.at_their_shortest for unit in units]
    routes = [_Route(placement, unit) for unit in units]
    bounds = [route.path for route in routes]
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        stage_costs = [unit.stages[stage] for unit in units for stage in stages]
        shared = [unit.head for unit in units if unit.head and placement.splits_head]
        work = math.fsum(cost.forward + cost.seconds(Kind.B) for cost in stage_costs)
        work += math.fsum(part.scores + part.weight_gradient for part in shared)
        bounds.append(min(route.starts[stages[0]] for route in routes) + work)
    return max(bounds)


class _Route:
    """The times of one microbatch alone: F through all stages, then I back.

    ``starts[k]`` and ``ends[k]`` are the times of its k-th station: stage k's F for k < stages, then the
    I from the last stage to the first.  ``tails[k]`` is the time from the end of station k until
    everything that follows it, W included, is done.  ``path`` is the end of the last W.
    """

    def __init__(self, placement: Placement, costs: Costs) -> None:
        stages = range(placement.stages)
        homes = [placement.rank_of(stage) for stage in (*stages, *reversed(stages))]
        seconds = [costs.stages[stage].forward for stage in stages]
        seconds += [costs.stages[stage].input_gradient for stage in reversed(stages)]
        self.stages = placement.stages
        self.starts: list[float] = []
        self.ends: list[float] = []
        now = 0.0
        for station, time in enumerate(seconds):
            if station == placement.stages and placement.splits_head and costs.head:
                now += costs.head.hidden + costs.head.scores + costs.head.sums
            if station and homes[station] != homes[station - 1]:
                now += costs.hop
            self.starts.append(now)
            now += time
            self.ends.append(now)
        finish = 0.0
        self.tails = [0.0] * len(seconds)
        for station in reversed(range(len(seconds))):
            if station >= placement.stages:
                weight = _weight(costs.stages[2 * placement.stages - 1 - station])
                finish = max(finish, self.ends[station] + weight)
            self.tails[station] = finish - self.ends[station]
        self.path = finish

    def gradient(self, stage: int) -> int:
        """Return the station of the I of ``stage``."""
        return 2 * self.stages - 1 - stage


def _weight(cost: StageCosts) -> float:
    """Return the least time that a W adds to its I: it may run inside of that."""
    return cost.weight_gradient - cost.hidden


def _until_weight(cost: StageCosts) -> float:
    """Return the least memory kept from an F to the end of its W; only after an I alone there may be more."""
    return min(cost.activation, cost.activation - cost.released_by_input_gradient)


def _window(
    route: _Route, stages: Sequence[int], stage_costs: Sequence[StageCosts], microbatches: int, limit: float
) -> float:
    """Return the window bound: idle time before the first gradient and after the last forward."""
    forward = microbatches * sum(cost.forward for cost in stage_costs)
    backward = microbatches * sum(cost.seconds(Kind.B) for cost in stage_costs)
    first_gradient = route.starts[route.gradient(stages[-1])]
    early = min(
        forward,
        first_gradient - route.starts[stages[0]],
        _most(limit, min(cost.activation for cost in stage_costs), max(cost.forward for cost in stage_costs)),
    )
    if early >= forward * (1 - 1e-9):  # equal but for rounding: no F is left to follow the first gradient
        return first_gradient + backward
    late = min(
        backward,
        _most(limit, min(map(_until_weight, stage_costs)), max(cost.seconds(Kind.B) for cost in stage_costs)),
    )
    return first_gradient + forward + backward - early + max(0.0, route.tails[stages[-1]] - late)


def _memory(
    route: _Route, stages: Sequence[int], stage_costs: Sequence[StageCosts], microbatches: int, limit: float
) -> float:
    """Return the memory bound: Little's law from the rank's first F on.

    A microbatch counts from the start of F to the end of I, and while its W runs.  As a rank does one action
    at a time, few can count soon after its first F, shortly before its last I, and shortly before its last
    W, when those that still count need both their I and their W.  The bound is the longer of two: until
    the last W of the rank, and until the last I, after which other ranks have their I.
    """
    area = sum(
        cost.activation * (route.ends[route.gradient(stage)] - route.starts[stage])
        + _until_weight(cost) * _weight(cost)
        for stage, cost in zip(stages, stage_costs, strict=True)
    )
    largest = max(cost.activation for cost in stage_costs)
    if area == 0:
        return 0.0
    if all(_until_weight(cost) == cost.activation == largest for cost in stage_costs):
        limit = largest * _whole(limit / largest)
    steps = math.ceil(limit / largest)
    missing = (steps - 1) * (limit - largest * steps / 2)  # memory still free, summed over these steps
    fill = min(cost.forward for cost in stage_costs)
    last = min(cost.input_gradient for cost in stage_costs)
    shortest = min(cost.seconds(Kind.B) for cost in stage_costs)
    tail = route.tails[route.gradient(stages[0])]
    # What is kept at the end of the last I counts only while its W runs, and one W runs at a time.
    at_end = min(largest * tail, limit * max(cost.weight_gradient for cost in stage_costs))

    def filled(counted: float, empty: float) -> float:
        plain, ramps = counted / limit, fill + empty
        longer = plain + missing * ramps / limit
        return longer if longer >= steps * ramps else plain

    until_last_weight = filled(microbatches * area, shortest)
    until_last_gradient = filled(microbatches * area - at_end, last)
    return max(until_last_weight, until_last_gradient + tail)


def _turns(
    route: _Route, stages: Sequence[int], stage_costs: Sequence[StageCosts], microbatches: int, limit: float
) -> Iterator[float]:
    """Yield bounds for each stage of the rank, after which microbatches go on in turns.

    A turn lasts from a microbatch's F of the stage to its I, during which the rank keeps its activations up
    to this stage; or, if a W frees those that count, to the first W of these.
    """
    for count, stage in enumerate(stages, start=1):
        costs_so_far, start = stage_costs[:count], route.starts[stage]
        returns = [route.ends[route.gradient(stage_before)] - start for stage_before in stages[:count]]
        done = [back + _weight(cost) for back, cost in zip(returns, costs_so_far, strict=True)]
        # On the rank, all these W and the I of the stages before come after the I of the stage.
        remaining = sum(cost.seconds(Kind.B) for cost in costs_so_far) - costs_so_far[-1].input_gradient
        until_all = max(returns[-1] + remaining, *done)
        after = max(route.tails[route.gradient(stage)], remaining)
        parts = list(map(_until_weight, costs_so_far))
        turns = {sum(cost.activation for cost in costs_so_far): returns[-1]}
        turns[sum(parts)] = min(done)
        for size, turn in turns.items():
            if size:
                at_once = max(1, _whole(limit / size))
                more = _most(max(0.0, limit - at_once * size), min(parts), 1)
                all_done = until_all
                if at_once == 1 and more == 0:
                    # The next microbatch's F of the stages before fit into memory only after the first W.
                    earlier = costs_so_far[:-1]
                    all_done = max(all_done, returns[-1] + remaining + sum(cost.forward for cost in earlier))
                last = _last_start(microbatches, at_once, more, turn, all_done, costs_so_far[-1].forward)
                yield start + last + returns[-1] + after


def _last_start(
    microbatches: int, at_once: int, more: float, turn: float, until_all: float, forward: float
) -> float:
    """Return how long after the first turn the last one starts, at the earliest.

    No more than ``at_once`` microbatches have a turn at a time.  Where as many have one, no more than
    ``more`` others have a W left, which they all have done ``until_all`` after their start.
    """
    starts: list[float] = []
    for number in range(microbatches):
        start = starts[-1] + forward if starts else 0.0
        over = number - at_once
        if over >= 0:
            early = starts[over] + turn
            if over >= more:
                early = max(early, starts[over - int(more)] + until_all)
            if at_once > 1:
                # Unless one microbatch more has had its turn.
                early = min(early, starts[over + 1] + turn)
            start = max(start, early)
        starts.append(start)
    return starts[-1]


def _most(limit: float, size: float, seconds: float) -> float:
    """Return how long work can last on what ``limit`` holds: ``seconds`` for every ``each`` of memory."""
    return math.inf if size == 0 else _whole(limit / size) * seconds


def _whole(value: float) -> int:
    """Round ``value`` down, unless rounding errors alone keep it below the next whole number."""
    return math.floor(value * (1 + 1e-9))
