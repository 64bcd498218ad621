"""A pipeline with its costs in whole numbers, on which every search works.

A microbatch visits ``2 * stages`` stations, one after the other: station s < stages is F of
stage s and station 2 * stages - 1 - s is its I.  W of stage s has the code ``2 * stages + s`` and
a whole backward ``3 * stages + s``.  An order is a list of such codes.  It names no microbatches:
each time a code comes up it means that stage's next microbatch, so every search keeps F, backwards and W
of a stage in microbatch order, on which message streams and bit-equal gradient sums rely.

Times are integers so that sums do not depend on the order of adding and ties are ties on every
machine.  Costs with a short decimal form are kept exactly; others are rounded to a ten-millionth
of the longest, or to a coarser step on pipelines of half a million actions and more, so that the loops can
count in 64 bits.  Activations that are whole numbers are kept exactly, too; others are rounded to about a
trillionth of the smallest limit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from megatron_pp_ext.compiler.limits import TOLERANCE
from megatron_pp_ext.schedule.actions import OF_STAGES, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.loops import Loop
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.program import Arrays, B, Column, I, Lists, Program, W

_EXACT_SCALES = (1, 2, 4, 5, 8, 10, 16, 20, 100, 1000, 10_000)
_TIME_STEPS = 10_000_000
_MOST_TIME_STEPS = 1 << 40
_MEMORY_BITS = 40

NEVER = 1 << 62
"""A time later than all others, including a W with the longest delay."""

Orders = list[list[int]]
"""One list of codes a rank."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One placement with integer costs.

    ``stations_by_rank`` are each rank's stations in the order in which a microbatch visits them.
    ``duration`` and ``home``, the rank, are indexed by code (stations, W, whole backwards).  ``delay`` is
    indexed by station and is the P2P latency to the next one, 0 on the same rank.  A code's action takes
    ``growth`` units of memory at its start, and after it ``kept`` units more are kept than before it, or
    less, below 0.  ``limits`` are per rank.
    ``scale`` is the number of integer time units in one unit of the costs.
    """

    placement: Placement
    microbatches: int
    stations_by_rank: tuple[tuple[int, ...], ...]
    duration: tuple[int, ...]
    delay: tuple[int, ...]
    home: tuple[int, ...]
    kept: tuple[int, ...]
    growth: tuple[int, ...]
    limits: tuple[int, ...]
    scale: float

    @property
    def stations(self) -> int:
        """The number of forwards and input gradients that a microbatch goes through."""
        return 2 * self.placement.stages

    @property
    def size(self) -> int:
        """The number of actions of a schedule with split backwards."""
        return 3 * self.placement.stages * self.microbatches

    @property
    def work(self) -> list[int]:
        """The time that each rank is busy."""
        busy = [0] * self.placement.ranks
        for rank, seconds in zip(self.home[: 3 * self.placement.stages], self.duration, strict=False):
            busy[rank] += self.microbatches * seconds
        return busy

    def weight_of(self, station: int) -> int:
        """Return the code of the W that belongs to the I at ``station``."""
        return 2 * self.stations - 1 - station

    def shortened(self, microbatches: int) -> "Problem":
        """Return the same pipeline with another number of microbatches."""
        return replace(self, microbatches=microbatches)

    def fits(self, orders: Orders) -> bool:
        """Whether no rank ever keeps more than its limit."""
        for order, limit in zip(orders, self.limits, strict=True):
            lives = accumulate(map(self.kept.__getitem__, order), initial=0)
            if any(live + self.growth[code] > limit for live, code in zip(lives, order, strict=False)):
                return False
        return True

    def split(self, orders: Orders) -> Orders:
        """Return ``orders`` with an I and its W in place of every whole backward."""
        whole = self.stations + self.placement.stages
        return [
            [part for code in order for part in self._parts(code)] if max(order) >= whole else order
            for order in orders
        ]

    def _parts(self, code: int) -> tuple[int, ...]:
        weight = code - self.placement.stages
        return (code,) if weight < self.stations else (self.weight_of(weight), weight)

    def program(self, orders: Orders, *, is_repeated: bool) -> Program:
        columns, stages = (Arrays() if is_repeated else Lists()), self.placement.stages
        bounds = columns.of([0, *accumulate(map(len, orders))])
        codes = columns.of(chain.from_iterable(orders))
        stage, kind, microbatch = (columns.zeros(len(codes)) for _ in range(3))
        done, halved = columns.zeros(4 * stages), columns.zeros(stages * self.microbatches)
        _spell(codes, stages, self.microbatches, done, halved, stage, kind, microbatch)
        return Program(self.placement, stage, kind, microbatch, bounds)

    def schedule(self, orders: Orders, name: str) -> Schedule:
        """Return ``orders`` as a Schedule of the given name."""
        program = self.program(orders, is_repeated=False)
        rows = (program.actions[first:end] for first, end in pairwise(program.columns.bounds))
        return Schedule(name, self.placement, self.microbatches, tuple(map(tuple, rows)))

    def orders(self, schedule: Schedule) -> Orders:
        """Return ``schedule`` in codes, which leaves out the names of microbatches.

        Where a stage does not take them in order they are named anew, and the schedule gets no longer: the
        first n inputs of a stage are there when any n of them are.
        """
        stages = self.placement.stages
        codes = range(2 * stages), range(2 * stages, 3 * stages), range(3 * stages, 4 * stages)
        # Lists, so that the million actions of a large pipeline share these few numbers.
        compute, weight, whole = map(list, codes)
        code = {Kind.F: compute, Kind.I: compute[::-1], Kind.W: weight, Kind.B: whole}
        return [[code[kind][stage] for stage, kind, _ in row] for row in schedule.orders]


@Loop
def _spell(
    codes: Column,
    stages: int,
    microbatches: int,
    done: Column,
    halved: Column,
    stage: Column,
    kind: Column,
    microbatch: Column,
) -> None:
    """Fill the last three columns with the actions that ``codes`` stand for.

    ``done`` counts the F, I, W and backwards of either spelling of every stage, and ``halved`` are the
    microbatches of its I, in their order.
    """
    for at in range(len(codes)):
        row, owner = codes[at] // stages, codes[at] % stages
        if row == I:
            owner = stages - 1 - owner
        stage[at], kind[at] = owner, row
        counted = B if row == I else row
        number = done[4 * owner + counted]
        done[4 * owner + counted] += 1
        if row == W:
            number = halved[owner * microbatches + number]
        elif row == I:
            halved[owner * microbatches + done[4 * owner + I]] = number
            done[4 * owner + I] += 1
        microbatch[at] = number


def with_value[Value](values: tuple[Value, ...], at: int, value: Value) -> tuple[Value, ...]:
    """Return ``values`` with ``value`` at place ``at``."""
    return (*values[:at], value, *values[at + 1 :])


def problem_of(placement: Placement, microbatches: int, costs: Costs, limits: Sequence[float]) -> Problem:
    """Convert costs (one StageCosts for each stage of ``placement``) and per-rank limits to integers."""
    stages = range(placement.stages)
    forwards = [placement.rank_of(stage) for stage in stages]
    route = forwards + forwards[::-1]
    seconds = [cost.seconds(kind) for cost in costs.stages for kind in OF_STAGES[:-1]]
    scale = _scale([costs.hop, *seconds], len(seconds) * microbatches)
    units = [value for cost in costs.stages for value in _amounts(cost)]
    grain, slack = _grain(units, limits)
    whole = [_whole(cost, scale, grain) for cost in costs.stages]
    by_code = [(stage, kind) for kind in OF_STAGES for stage in whole[:: -1 if kind is Kind.I else 1]]
    hop, last = round(costs.hop * scale), 2 * placement.stages - 1
    stages_of_ranks = tuple(placement.stages_of(rank) for rank in range(placement.ranks))
    return Problem(
        placement=placement,
        microbatches=microbatches,
        stations_by_rank=tuple(
            (*forth, *(last - stage for stage in reversed(forth))) for forth in stages_of_ranks
        ),
        duration=tuple(int(stage.seconds(kind)) for stage, kind in by_code),
        delay=(*(hop if rank != following else 0 for rank, following in pairwise(route)), 0),
        home=(*route, *forwards, *forwards),
        kept=tuple(int(stage.kept(kind)) for stage, kind in by_code),
        growth=tuple(int(stage.growth(kind)) for stage, kind in by_code),
        limits=tuple(math.floor(limit * (1 + TOLERANCE) * grain) + slack for limit in limits),
        scale=scale,
    )


def _whole(costs: StageCosts, scale: float, grain: float) -> StageCosts:
    """Return ``costs`` in whole numbers; work takes some time."""
    times = costs.forward, costs.input_gradient, costs.weight_gradient
    activation, released, *workspaces = (round(amount * grain) for amount in _amounts(costs))
    f, i, w = (max(1, round(time * scale)) for time in times)
    hidden = min(round(costs.hidden * scale), i - 1, w)
    during_i, during_b = workspaces
    return StageCosts(
        f, i, w, activation, released, hidden=hidden, workspace=during_i, workspace_in_whole=during_b
    )


def _amounts(costs: StageCosts) -> tuple[float, float, float, float]:
    """Return all of ``costs`` that is memory of activations."""
    return (costs.activation, costs.released_by_input_gradient, costs.workspace, costs.workspace_in_whole)


def _scale(values: Sequence[float], actions: int) -> float:
    """Return the smallest of ``_EXACT_SCALES`` that makes all values whole, or else one for rounding.

    OverflowError where ``actions`` of the longest value add up to more than a float holds.
    """
    # A schedule is no longer than twice its actions, and a heap multiplies its times by their number.
    most = max(1, min(_MOST_TIME_STEPS, (1 << 61) // actions**2))
    longest = max(values)
    if math.isinf(longest * actions):
        raise OverflowError(f"{actions} actions of {longest:g} each take longer than a float can say")
    for scale in _EXACT_SCALES:
        scaled = [value * scale for value in values]
        if longest * scale <= most and all(
            abs(value - round(value)) <= TOLERANCE * value for value in scaled
        ):
            return scale
    return min(_TIME_STEPS, most) / longest


def _grain(activations: Sequence[float], limits: Sequence[float]) -> tuple[float, int]:
    """Return the memory units in one unit of activation, and how many of them rounding may add up to.

    Whole numbers (bytes, counts) need no finer units.
    """
    if all(float(value).is_integer() for value in activations):
        return 1, 0
    return 2.0**_MEMORY_BITS / min(limits), 2 ** (_MEMORY_BITS - 31)
