"""Orders of actions for the true costs, within what each rank may keep: list scheduling.

The compiler's and the families' orders are for equal microbatches.  Where these differ and none of their
orders keeps a memory limit, ranks take other orders of F, I and W: whenever a rank is free it does the first
action of its schedule whose inputs are there and for which it has memory.  Each stage still takes the
microbatches forward, and back, in their order.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from megatron_pp_ext.features.lengths.steps import Floats, Integers, Memory, Table
from megatron_pp_ext.schedule.actions import OF_STAGES, Kind, Schedule
from megatron_pp_ext.schedule.columns import as_list
from megatron_pp_ext.schedule.loops import Loop
from megatron_pp_ext.schedule.program import SUMS, B, Columns, F, I, Program

_ROUNDING = 1e-9
"""The part of a limit by which sums may be above it."""


class Within:
    """Finds orders of the actions of ``schedule``, whose ``memory`` has them in the schedule's order.

    A rank that takes a microbatch reserves memory for all its stages, if without this the ranks come to wait
    for each other.  Pairs and copies are planned for an order: there is no other one then.
    """

    def __init__(self, schedule: Schedule, memory: Memory) -> None:
        self._schedule, self._memory = schedule, memory
        self._is_fixed = bool(schedule.paired or schedule.copies)
        self._program = Program.of(schedule, is_repeated=True)
        placement = schedule.placement
        of_ranks = [placement.stages_of(rank) for rank in range(placement.ranks)]
        forward = OF_STAGES.index(Kind.F)
        self._rows = [np.array([len(OF_STAGES) * stage + forward for stage in stages]) for stages in of_ranks]
        firsts = [stages[0] for stages in of_ranks]
        columns = self._program.columns
        rank, stage, kind = (np.array(each) for each in (columns.rank, columns.stage, columns.kind))
        self._rank = rank
        self._begins = (kind == F) & (stage == np.array(firsts)[rank])

    def listed(self, order: Sequence[int], table: Table, limits: Floats) -> tuple[float, Integers] | None:
        """Return how long the step takes with the microbatches in this ``order``, and the actions by number.

        Rank r keeps at most ``limits[r]``.  None where no order is found, as where one microbatch needs more.
        """
        if self._is_fixed:
            return None
        row, slot = self._memory.row, np.array(order, np.int64)[self._memory.slot]
        seconds, kept = table.seconds[row, slot], table.kept[row, slot]
        of_ranks = np.array([table.kept[rows].sum(axis=0) for rows in self._rows])
        whole = np.where(self._begins, of_ranks[self._rank, slot], 0.0)
        columns, stages = self._program.columns, self._schedule.placement.stages
        for reserves in (False, True):
            numbers = np.zeros(len(row), np.int64)
            took = _listed(columns, seconds, kept, whole * reserves, table.delays, limits, stages, numbers)
            if took < np.inf:
                return took, numbers
        return None

    def schedule(self, numbers: Integers) -> Schedule:
        """Return the schedule with the actions in this order."""
        actions, places = self._program.actions, numbers.tolist()
        orders = (
            tuple(actions[number] for number in places[first:end])
            for first, end in pairwise(as_list(self._program.columns.bounds))
        )
        return replace(self._schedule, orders=tuple(orders))


@Loop
def _listed(
    columns: Columns,
    seconds: Floats,
    kept: Floats,
    whole: Floats,
    delays: Floats,
    limits: Floats,
    stages: int,
    order: Integers,
) -> float:
    """Fill ``order`` with the actions of all ranks; return when the last ends, infinite where one is left."""
    stage_of, kind, microbatch, rank_of, _, bounds, begins, needed, wires = columns
    count, ranks = len(kind), len(limits)
    ends = np.full(count, -1.0)
    first, filled = bounds[:-1].copy(), bounds[:-1].copy()
    free, live, reserved = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    forwards, backwards = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    for _ in range(count):
        best, best_start = -1, np.inf
        for rank in range(ranks):
            room = limits[rank] * (1 + _ROUNDING)
            while first[rank] < bounds[rank + 1] and ends[first[rank]] >= 0:
                first[rank] += 1
            for action in range(first[rank], bounds[rank + 1]):
                if ends[action] >= 0:
                    continue
                stage, code = stage_of[action], kind[action]
                if code == F and forwards[stage] != microbatch[action]:
                    continue
                if code in (I, B) and backwards[stage] != microbatch[action]:
                    continue
                if kept[action] > 0 and live[rank] + kept[action] > room:
                    continue
                if whole[action] > 0 and reserved[rank] + whole[action] > room:
                    continue
                arrival, is_ready = 0.0, True
                for entry in range(begins[action], begins[action + 1]):
                    need = needed[entry]
                    if ends[need] < 0:
                        is_ready = False
                        break
                    is_here = rank_of[need] == rank and wires[entry] != SUMS
                    arrival = max(arrival, ends[need] + (0.0 if is_here else delays[wires[entry]]))
                if not is_ready:
                    continue
                start = max(free[rank], arrival)
                if start < best_start:
                    best, best_start = action, start
                if arrival <= free[rank]:
                    break
        if best < 0:
            return np.inf
        rank, stage, code = rank_of[best], stage_of[best], kind[best]
        ends[best] = free[rank] = best_start + seconds[best]
        live[rank] += kept[best]
        reserved[rank] += whole[best] if kept[best] > 0 else kept[best]
        if code == F:
            forwards[stage] += 1
        elif code in (I, B):
            backwards[stage] += 1
        order[filled[rank]] = best
        filled[rank] += 1
    return ends.max()
