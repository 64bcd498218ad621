"""A schedule as columns that are timed with any order of its microbatches.

What an action waits for does not depend on which microbatch is in which place of the order.  So the steps of
a schedule's walk are found once, and an order only decides whose seconds a step takes: those in ``table``,
which has a row for each kind of work and a column for each microbatch.

W are no steps here where the schedule has them: no other rank waits for them, and ``timing`` puts them where
a rank would be idle.
"""

from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.features.lengths.costs import LengthCosts
from megatron_pp_ext.features.lengths.microbatches import Microbatches
from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind, Schedule
from megatron_pp_ext.schedule.columns import as_list
from megatron_pp_ext.schedule.copy_steps import with_copies
from megatron_pp_ext.schedule.program import Program
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
    """The seconds of each row for each microbatch, the seconds on each wire, and what a pair takes.

    ``tokens`` are those of each microbatch.
    """

    seconds: Floats
    delays: Floats
    pair: float
    tokens: Floats


class Memory(NamedTuple):
    """What the actions of all ranks keep, in the order in which the schedule has them.

    Rank r has those from ``bounds[r]`` to ``bounds[r + 1]``.  Each keeps its ``rate`` for every token of the
    microbatch in its ``slot``, below 0 what it gives back.
    """

    bounds: Integers
    rate: Floats
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
        walk = Walk(Program.of_orders(kept, placement, schedule.paired, is_repeated=True))
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
        """Return the W of the schedule, for so many steps."""
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

    def memory(self, costs: LengthCosts) -> Memory:
        """Return what actions keep where stages have these ``costs``."""
        kept = costs.per_token
        actions = [action for order in self.schedule.orders for action in order]
        bounds = np.array([0, *accumulate(map(len, self.schedule.orders))])
        rates = np.array([kept.kept(action) for action in actions], float)
        return Memory(bounds, rates, np.array([action.microbatch for action in actions]))


def table_of(costs: LengthCosts, microbatches: Microbatches) -> Table:
    """Return the seconds of all kinds of work, in the rows that steps have, for ``microbatches``."""
    tokens, squares = (np.array(each, float) for each in (microbatches.tokens, microbatches.squares))
    rows: list[Any] = []
    for stage in costs.stages:
        f, i, w = (
            each * tokens + quadratic * squares
            for each, quadratic in zip(stage.per_token, stage.per_square, strict=True)
        )
        rows += [f, i, w, i + w]
    shared = costs.vocabulary
    rows += [tokens * (shared.scores if shared else 0.0), tokens * (shared.weight_gradient if shared else 0.0)]
    rows += [0.0 * tokens, *(stage.copy * tokens for stage in costs.stages)]
    delays = [costs.hop, shared.hidden if shared else 0.0, shared.sums if shared else 0.0, 0.0]
    return Table(np.ascontiguousarray(rows), np.array(delays), costs.pair, tokens)


def _row(action: Action, stages: int) -> int:
    if action.kind in OF_STAGES:
        return len(OF_STAGES) * action.stage + OF_STAGES.index(action.kind)
    return len(OF_STAGES) * stages + (action.kind is Kind.T)


def _row_without_work(stages: int) -> int:
    return len(OF_STAGES) * stages + 2


def _no_weights(ranks: int, count: int) -> Weights:
    empty, none = np.zeros(0, np.int64), np.zeros(count, np.int64)
    return Weights(np.zeros(ranks + 1, np.int64), empty, empty, none, none)
