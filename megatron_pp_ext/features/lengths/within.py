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

from megatron_pp_ext.features.lengths.steps import Floats, Integers
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.columns import as_list
from megatron_pp_ext.schedule.loops import Loop
from megatron_pp_ext.schedule.program import SUMS, B, Columns, F, I, Program
from megatron_pp_ext.schedule.unit_costs import UnitCosts

_ROUNDING = 1e-9
"""The part of a limit by which sums may be above it."""


def within_limits(schedule: Schedule, costs: UnitCosts, limits: Sequence[float]) -> Schedule | None:
    """Return the actions of ``schedule`` in orders by which rank r keeps at most ``limits[r]``.

    ``costs`` are those of the microbatches in the order of the schedule.  A rank that takes a microbatch
    reserves memory for all its stages, if without this the ranks come to wait for each other.  None where
    that does not help, where a single microbatch needs more, and for pairs and copies, which are planned for
    an order.
    """
    if schedule.paired or schedule.copies:
        return None
    program = Program.of(schedule, is_repeated=True)
    actions, placement = program.actions, schedule.placement
    seconds = np.array([costs.seconds(action) for action in actions])
    kept = np.array([costs.kept(action) for action in actions])
    whole = np.zeros(len(actions))
    for number, (stage, kind, microbatch) in enumerate(actions):
        own = placement.stages_of(placement.rank_of(stage))
        if kind is Kind.F and stage == own[0]:
            whole[number] = sum(costs.kept(Action(one, Kind.F, microbatch)) for one in own)
    shared = costs.head
    delays = np.array([costs.hop, shared.hidden if shared else 0.0, shared.sums if shared else 0.0, 0.0])
    for reserves in (False, True):
        order = np.zeros(len(actions), np.int64)
        room = np.array(limits, float)
        if _listed(program.columns, seconds, kept, whole * reserves, delays, room, placement.stages, order):
            bounds = as_list(program.columns.bounds)
            numbers = order.tolist()
            orders = (
                tuple(actions[number] for number in numbers[first:end]) for first, end in pairwise(bounds)
            )
            return replace(schedule, orders=tuple(orders))
    return None


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
) -> bool:
    """Fill ``order`` with the actions of all ranks; return whether none is left."""
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
            return False
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
    return True
