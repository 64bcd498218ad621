"""A schedule whose places are filled with units, in any order of them, and how long a step takes then.

What an action waits for does not depend on which unit is in which place.  So the steps of a schedule's walk
are found once, and an order only decides whose seconds a step takes.  The rules are those of
``schedule.timing``.  In addition, a rank does a W where it would wait for an input for long enough, or has to
before a forward (``Weights``), and what is left of them at its end: no other rank waits for a W.
"""

from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from megatron_pp_ext.features.units.table import COPY, NOTHING, Floats, Integers, Table
from megatron_pp_ext.schedule.actions import Action, Kind, Orders, Schedule
from megatron_pp_ext.schedule.loops import Loop, part_of_loop
from megatron_pp_ext.schedule.program import KINDS, Program, as_list
from megatron_pp_ext.schedule.walk import Walk, with_copies

ROUNDING = 1e-9
"""The part of a limit by which sums may be above it."""

EXCESS = 100.0
"""How much longer a step counts for each part by which a rank is above its limit."""

_NONE = -1


class Weights(NamedTuple):
    """The W of all ranks, in the order in which the schedule has them, and when each may run.

    Rank r has those from ``bounds[r]`` to ``bounds[r + 1]``, of which each takes what is in its ``row`` for
    the unit in its ``slot``.  At a step, those before ``ready`` have had their I.  Those before ``due`` come
    first: the schedule has them before this forward, and to do them later would keep more memory.
    """

    bounds: Integers
    row: Integers
    slot: Integers
    ready: Integers
    due: Integers


class OrderSteps(NamedTuple):
    """The steps, counted from 1, as in ``walk.WalkSteps``.

    A step is on ``rank`` and takes what is in its ``row`` (``Table.by_row``) for the unit in its ``slot``.
    In a pair, ``other_row`` and ``other_slot`` are those of its second action; elsewhere ``other_row`` is -1.
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


class OrderMemory(NamedTuple):
    """The memory that actions of all ranks keep, in the schedule's order.

    Rank r has those from ``bounds[r]`` to ``bounds[r + 1]``.  Each keeps what is in its ``row`` for the unit
    in its ``slot``.
    """

    bounds: Integers
    row: Integers
    slot: Integers


class Fixed(NamedTuple):
    """The steps to time, the memory of actions, and the arrays of one pass, which the next uses again.

    ``ends`` are those of steps, and ``done[step]`` the W that the rank has done before the step.
    """

    steps: OrderSteps
    memory: OrderMemory
    ends: Floats
    done: Integers


def no_fixed() -> Fixed:
    """Return the arrays of a schedule without actions."""
    empty, rank = np.zeros(0, np.int64), np.zeros(1, np.int64)
    weights = Weights(rank, empty, empty, empty, empty)
    steps = OrderSteps(empty, empty, empty, empty, empty, empty, empty, empty, weights)
    return Fixed(steps, OrderMemory(rank, empty, empty), np.zeros(0), empty)


class FixedOrder:
    """The places of ``schedule`` for its units, in which W stay where they are unless ``moves_weights``.

    They stay, too, where activations are copied to the host, since copies are planned around them.
    """

    def __init__(self, schedule: Schedule, moves_weights: bool = True) -> None:
        self.schedule, placement = schedule, schedule.placement
        moves_weights = moves_weights and not schedule.copies
        orders = [
            [action for action in order if action.kind is not Kind.W or not moves_weights]
            for order in schedule.orders
        ]
        walk = Walk(Program.of_orders(Orders(orders, placement, schedule.paired), is_repeated=True))
        self._step_of = as_list(walk.step_of)
        if schedule.copies:
            walk = with_copies(walk, schedule)
        count, stages = len(walk.steps.before), placement.stages
        columns = [np.full(count, fill) for fill in (_NONE, NOTHING * stages, 0, _NONE, 0)]
        rank, row, slot, other_row, other_slot = columns
        latest = 0
        for action, step in zip(walk.program.actions, as_list(walk.step_of), strict=False):
            rank[step] = placement.rank_of(action.stage)
            is_second = step == latest
            (other_row if is_second else row)[step] = _row(action, stages)
            (other_slot if is_second else slot)[step] = action.microbatch
            latest = step
        for (stage, microbatch), out, _, _, back in zip(*(walk.copies or [()] * 5), strict=True):
            for step in (out, back):
                row[step], slot[step] = COPY * stages + stage, microbatch
        weights = self._weights(count) if moves_weights else _no_weights(placement.ranks, count)
        before, sends, wire, _ = walk.steps
        self._steps = OrderSteps(before, sends, wire, rank, row, slot, other_row, other_slot, weights)

    @property
    def moves_weights(self) -> bool:
        """Whether any W is put where its rank would wait."""
        return bool(len(self._steps.weights.row))

    @cached_property
    def fixed(self) -> Fixed:
        """The arrays of passes over the schedule."""
        count = len(self._steps.before)
        return Fixed(self._steps, self._memory, np.zeros(count), np.zeros(count, np.int64))

    def timed(self, order: Integers, table: Table, patience: float = 1.0) -> tuple[float, Integers]:
        """Return how long a step takes with units in this ``order``, and the W done before each step."""
        return _time_order(self.fixed, table.by_row, order, patience), self.fixed.done

    def excess(self, order: Integers, table: Table, limits: Floats) -> float:
        """Return by which part of its limit the fullest rank is above it; 0 without limits."""
        return _excess_of(self.fixed, table.by_row, order, limits) if len(limits) else 0.0

    def _weights(self, count: int) -> Weights:
        ready, due = np.zeros(count, np.int64), np.zeros(count, np.int64)
        bounds, moved = [0], list[Action]()
        steps = iter(self._step_of)
        for order in self.schedule.orders:
            of_rank = [action for action in order if action.kind is Kind.W]
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
                    while able < len(of_rank) and (of_rank[able].stage, of_rank[able].microbatch) in done:
                        able += 1
            moved += of_rank
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

    @property
    def _memory(self) -> OrderMemory:
        actions = [action for order in self.schedule.orders for action in order]
        stages = self.schedule.placement.stages
        bounds = np.array([0, *accumulate(map(len, self.schedule.orders))])
        rows = np.array([_row(action, stages) for action in actions])
        return OrderMemory(bounds, rows, np.array([action.microbatch for action in actions]))


def _row(action: Action, stages: int) -> int:
    return KINDS.index(action.kind) * stages + action.stage


def _no_weights(ranks: int, count: int) -> Weights:
    empty, none = np.zeros(0, np.int64), np.zeros(count, np.int64)
    return Weights(np.zeros(ranks + 1, np.int64), empty, empty, none, none)


@part_of_loop
def timed(fixed: Fixed, table: Table, order: Integers, patience: float) -> float:
    """Return the end of the last action, and fill the arrays of ``fixed``.

    A W is put into a hole that is as long as its part ``patience``: with 1 it never delays what follows.
    Those at the end are left out of ``done``.
    """
    steps, _, ends, done = fixed
    before, sends, wire, rank, row, slot, other_row, other_slot, weights = steps
    bounds, weight_row, weight_slot, ready, due = weights
    seconds, _, _, _, delays, pair = table
    latest = 0.0
    finished = bounds[:-1].copy()
    ended = np.zeros(len(finished))
    for step in range(1, len(before)):
        start, mine = ends[before[step]], rank[step]
        arrival = ends[sends[step]] + delays[wire[step]] if sends[step] else 0.0
        took = seconds[row[step], order[slot[step]]]
        if other_row[step] >= 0:
            other = seconds[other_row[step], order[other_slot[step]]]
            took = max(pair * (took + other), took, other)
        if ready[step]:
            first = bounds[mine]
            at = finished[mine]
            while at < first + due[step]:
                start += seconds[weight_row[at], order[weight_slot[at]]]
                at += 1
            while at < first + ready[step]:
                length = seconds[weight_row[at], order[weight_slot[at]]]
                if start + patience * length > arrival:
                    break
                start += length
                at += 1
            finished[mine] = at
            done[step] = at - first
        if arrival > start:
            start = arrival
        ends[step] = start + took
        latest = max(latest, ends[step])
        if mine >= 0:
            ended[mine] = ends[step]
    for mine in range(len(finished)):
        end = ended[mine]
        for at in range(finished[mine], bounds[mine + 1]):
            end += seconds[weight_row[at], order[weight_slot[at]]]
        latest = max(latest, end)
    return latest


@part_of_loop
def excess(memory: OrderMemory, table: Table, order: Integers, limits: Floats) -> float:
    """Return by which part of its limit the fullest rank is above it; 0 where all keep theirs."""
    bounds, row, slot = memory
    most = 0.0
    for rank in range(len(limits)):
        live = peak = 0.0
        for action in range(bounds[rank], bounds[rank + 1]):
            unit = order[slot[action]]
            peak = max(peak, live + table.taken[row[action], unit])
            live += table.kept[row[action], unit]
        most = max(most, peak / limits[rank] - 1)
    return most if most > ROUNDING else 0.0


@part_of_loop
def judged(fixed: Fixed, table: Table, order: Integers, limits: Floats) -> float:
    """Return how long a step takes with ``order``, and much longer if a rank is above its limit."""
    took = timed(fixed, table, order, 1.0)
    if len(limits):
        took *= 1 + EXCESS * excess(fixed.memory, table, order, limits)
    return took


@Loop
def _time_order(fixed: Fixed, table: Table, order: Integers, patience: float) -> float:
    return timed(fixed, table, order, patience)


@Loop
def _excess_of(fixed: Fixed, table: Table, order: Integers, limits: Floats) -> float:
    return excess(fixed.memory, table, order, limits)
