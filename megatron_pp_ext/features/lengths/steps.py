"""A schedule as columns that are timed with any order of its microbatches.

What an action waits for does not depend on which microbatch is in which place of the order.  So the steps of
a schedule's walk are found once, and an order only decides whose seconds a step takes: those in ``table``,
which has a row for each kind of work and a column for each microbatch.

W are no steps here where the schedule has them: no other rank waits for them, and ``timing`` puts them where
a rank would be idle.
"""

from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind, Schedule
from megatron_pp_ext.schedule.columns import as_list
from megatron_pp_ext.schedule.copy_steps import with_copies
from megatron_pp_ext.schedule.orders import Orders
from megatron_pp_ext.schedule.program import Program
from megatron_pp_ext.schedule.unit_costs import UnitCosts
from megatron_pp_ext.schedule.walk import Walk

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

_NONE = -1


class Weights(NamedTuple):
    """The W of all ranks, in the order in which the schedule has them, and when each may run.

    Rank r has those from ``bounds[r]`` to ``bounds[r + 1]``, of which each takes what is in its ``row`` for
    the microbatch in its ``slot``.  At a step, those before ``ready`` have had their I.  Those before ``due``
    come first: the schedule has them before this forward, and to do them later would keep more memory.
    """

    bounds: Integers
    row: Integers
    slot: Integers
    ready: Integers
    due: Integers


class OrderSteps(NamedTuple):
    """The steps, counted from 1, as in ``walk.Steps``.

    A step is on ``rank`` and takes what is in its ``row`` for the microbatch in its ``slot``.  In a pair,
    ``other_row`` and ``other_slot`` are those of its second action; elsewhere ``other_row`` is -1.
    """

    before: Integers
    sends: Integers
    wire: Integers
    rank: Integers
    row: Integers
    slot: Integers
    other_row: Integers
    other_slot: Integers
    weights: Weights


class Table(NamedTuple):
    """What work takes and keeps: a row for each kind, and a column for each microbatch.

    Rows are those of F, I, W and B of each stage, S, T, no work, and a copy of each stage's activations.
    ``kept`` is above 0 for what is kept from the start on, and below 0 for what the end gives back.
    ``delays`` are the seconds on each wire, and ``pair`` is what a pair takes (``Costs.pair``).
    """

    seconds: Floats
    kept: Floats
    delays: Floats
    pair: float


class Memory(NamedTuple):
    """What the actions of all ranks keep, in the order in which the schedule has them.

    Rank r has those from ``bounds[r]`` to ``bounds[r + 1]``.  Each keeps what is in its ``row`` for the
    microbatch in its ``slot``.
    """

    bounds: Integers
    row: Integers
    slot: Integers


class Movable:
    """The ``steps`` of ``schedule``, in which W stay where they are unless ``moves_weights``.

    They stay, too, where activations are copied to the host, since copies are planned around them.
    """

    def __init__(self, schedule: Schedule, moves_weights: bool = True) -> None:
        self.schedule, placement = schedule, schedule.placement
        moves_weights = moves_weights and not schedule.copies
        kept = [
            [action for action in order if action.kind is not Kind.W or not moves_weights]
            for order in schedule.orders
        ]
        walk = Walk(Program.of_orders(Orders(kept, placement, schedule.paired), is_repeated=True))
        self._step_of = as_list(walk.step_of)
        if schedule.copies:
            walk = with_copies(walk, schedule)
        count = len(walk.steps.before)
        work = [np.full(count, fill) for fill in (_NONE, _row_without_work(placement.stages), 0, _NONE, 0)]
        rank, row, slot, other_row, other_slot = work
        latest = 0
        for action, step in zip(walk.program.actions, as_list(walk.step_of), strict=False):
            rank[step] = placement.rank_of(action.stage)
            is_second = step == latest
            (other_row if is_second else row)[step] = _row(action, placement.stages)
            (other_slot if is_second else slot)[step] = action.microbatch
            latest = step
        for (stage, microbatch), out, _, _, back in zip(*(walk.copies or [()] * 5), strict=True):
            for step in (out, back):
                row[step], slot[step] = _row_without_work(placement.stages) + 1 + stage, microbatch
        weights = self._weights(count) if moves_weights else _no_weights(placement.ranks, count)
        before, sends, wire, _ = walk.steps
        self.steps = OrderSteps(before, sends, wire, rank, row, slot, other_row, other_slot, weights)

    def _weights(self, count: int) -> Weights:
        ready, due = np.zeros(count, np.int64), np.zeros(count, np.int64)
        bounds, moved = [0], list[Action]()
        steps = iter(self._step_of)
        for order in self.schedule.orders:
            mine = [action for action in order if action.kind is Kind.W]
            done: set[tuple[int, int]] = set()
            passed = able = 0
            for action in order:
                if action.kind is Kind.W:
                    passed += 1
                    continue
                step = next(steps)
                # The second action of a pair is in the step of the first, which must not wait for it.
                ready[step] = ready[step] or able
                if action.kind in (Kind.F, Kind.S):
                    due[step] = passed
                if action.kind is Kind.I:
                    done.add((action.stage, action.microbatch))
                    while able < len(mine) and (mine[able].stage, mine[able].microbatch) in done:
                        able += 1
            moved += mine
            bounds.append(len(moved))
        rows = [_row(action, self.schedule.placement.stages) for action in moved]
        slots = [action.microbatch for action in moved]
        at, row, slot = (np.array(each, np.int64) for each in (bounds, rows, slots))
        return Weights(at, row, slot, ready, due)

    def with_weights_at(self, done: Integers) -> Schedule:
        """Return the schedule whose ranks have done so many of their W before each step."""
        steps, orders = iter(self._step_of), list[tuple[Action, ...]]()
        before = done.tolist()
        for order in self.schedule.orders:
            weights = [action for action in order if action.kind is Kind.W]
            placed, latest = list[Action](), 0
            at = 0
            for action in order:
                if action.kind is Kind.W:
                    continue
                step = next(steps)
                if step != latest:
                    placed += weights[at : max(at, before[step])]
                    at = max(at, before[step])
                placed.append(action)
                latest = step
            orders.append((*placed, *weights[at:]))
        return replace(self.schedule, orders=tuple(orders))

    @cached_property
    def memory(self) -> Memory:
        actions = [action for order in self.schedule.orders for action in order]
        stages = self.schedule.placement.stages
        bounds = np.array([0, *accumulate(map(len, self.schedule.orders))])
        rows = np.array([_row(action, stages) for action in actions])
        return Memory(bounds, rows, np.array([action.microbatch for action in actions]))


def table_of(costs: UnitCosts) -> Table:
    """Return what all kinds of work take and keep for the microbatches of ``costs``."""
    seconds, kept = [], []
    for unit in costs.units:
        shared = unit.head
        own = (shared.scores, shared.weight_gradient) if shared else (0.0, 0.0)
        of_stages = [stage.seconds(kind) for stage in unit.stages for kind in OF_STAGES]
        seconds.append([*of_stages, *own, 0.0, *(stage.copy for stage in unit.stages)])
        activation = shared.activation if shared else 0.0
        keeping = [stage.kept(kind) for stage in unit.stages for kind in OF_STAGES]
        kept.append([*keeping, activation, -activation, 0.0, *(0.0 for _ in unit.stages)])
    shared = costs.head
    delays = [costs.hop, shared.hidden if shared else 0.0, shared.sums if shared else 0.0, 0.0]
    by_row, kept_by_row = (np.ascontiguousarray(np.array(each).T) for each in (seconds, kept))
    return Table(by_row, kept_by_row, np.array(delays), costs.pair)


def _row(action: Action, stages: int) -> int:
    if action.kind in OF_STAGES:
        return len(OF_STAGES) * action.stage + OF_STAGES.index(action.kind)
    return len(OF_STAGES) * stages + (action.kind is Kind.T)


def _row_without_work(stages: int) -> int:
    return len(OF_STAGES) * stages + 2


def _no_weights(ranks: int, count: int) -> Weights:
    empty, none = np.zeros(0, np.int64), np.zeros(count, np.int64)
    return Weights(np.zeros(ranks + 1, np.int64), empty, empty, none, none)
