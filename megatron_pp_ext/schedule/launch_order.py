"""The order in which all ranks of a pipeline launch their actions, from a simulation of the schedule.

``schedule.messages`` has the proof that no pipeline can hang in any such order.
"""

from itertools import chain, pairwise
from operator import add

from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind
from megatron_pp_ext.schedule.check import InvalidSchedule
from megatron_pp_ext.schedule.columns import Column, as_list
from megatron_pp_ext.schedule.late_receives import late
from megatron_pp_ext.schedule.orders import Announced, Orders
from megatron_pp_ext.schedule.program import KINDS, Program
from megatron_pp_ext.schedule.walk import Walk

WORK = {Kind.F: 1000, Kind.I: 1100, Kind.W: 700, Kind.B: 1800, Kind.S: 400, Kind.T: 200}
P2P = HIDDEN = 50
SUMS = 100
"""The simulated times of actions and messages, in the usual proportions of a transformer's layers.

``HIDDEN`` and ``SUMS`` are those of the exchanges about a split head (``Exchange``).  All are whole
numbers, so that the line is the same on every machine.  A schedule may have other times of actions
(``Schedule.durations``), in units of which a mean F takes as many.
"""


def launch_order(orders: Orders) -> list[tuple[int, int, Action]]:
    """Return all actions of ``orders``, each with its simulated end and its rank, in the order of launches.

    Actions are sorted by their simulated ends, and by rank where these are equal, from the last rank on where
    the placement ``ends_on_last``; the two of a pair, which end together, follow each other as on their rank.
    Messages from actions that are not in ``orders`` were sent before these began.  Where inputs of stages
    announce their shapes, their senders come later (``late_receives``); a head that ranks share goes with
    known shapes alone.

    Raises InvalidSchedule where the ranks of ``orders`` wait for each other.
    """
    walk = walk_over(orders)
    program, (starts, ends) = walk.program, times(walk)
    of_actions = program.make.taken(ends, walk.step_of[:-1])
    numbers = _in_order(program, of_actions)
    if orders.announced is not Announced.NOTHING and not orders.placement.splits_head:
        numbers = late(walk, numbers, starts, ends, orders)
    return [(of_actions[number], program.columns.rank[number], program.actions[number]) for number in numbers]


def walk_over(orders: Orders) -> Walk:
    """Return the walk over ``orders``, some of whose messages may be from before.

    Raises InvalidSchedule where the ranks wait for each other.
    """
    walk = Walk(Program.of_orders(orders, is_open=True))
    if not walk.is_complete:
        raise InvalidSchedule("the ranks wait for each other: let schedule.check name the actions")
    return walk


def in_line(walk: Walk) -> tuple[Column, Column]:
    """Return the simulated ends of all actions in the order of launches, and their numbers."""
    program, (_, of_steps) = walk.program, times(walk)
    ends = program.make.taken(of_steps, walk.step_of[:-1])
    numbers = _in_order(program, ends)
    return program.make.taken(ends, numbers), numbers


def times(walk: Walk) -> tuple[Column, Column]:
    """Return the simulated starts and ends of all steps."""
    program = walk.program
    delays, stages = (P2P, HIDDEN, SUMS, SUMS), program.placement.stages
    no_copies = [0] * stages  # they change nothing about when messages leave
    if program.durations:
        return walk.times_of_each(_of_each(program), delays, add, no_copies)
    durations_of_kinds = [WORK[kind] for kind in OF_STAGES] * stages
    durations_of_kinds += WORK[Kind.S], WORK[Kind.T], 0
    durations = [
        *durations_of_kinds,
        *(durations_of_kinds[first] + durations_of_kinds[second] for first, second in program.pairs),
        *no_copies,
    ]
    return walk.times(durations, delays)


def _of_each(program: Program) -> list[int]:
    """Return the duration of each action; actions of stages have their unit's."""
    stages, kinds, units, *_ = map(as_list, program.columns)
    kinds_of_stage, of_units = len(OF_STAGES), program.durations
    return [
        of_units[unit][kinds_of_stage * stage + kind] if kind < kinds_of_stage else WORK[KINDS[kind]]
        for stage, kind, unit in zip(stages, kinds, units, strict=True)
    ]


def _in_order(program: Program, ends: Column) -> Column:
    """Return the numbers of actions by their ``ends``; equal ones by rank, from the one with stage 0 on."""
    if not program.placement.ends_on_last:
        return program.make.order(ends)  # they go by rank already
    ranks = reversed(list(pairwise(as_list(program.columns.bounds))))
    numbers = program.make.of(chain.from_iterable(range(*bounds) for bounds in ranks))
    return program.make.taken(numbers, program.make.order(program.make.taken(ends, numbers)))
