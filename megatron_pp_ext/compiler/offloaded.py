"""The shortest step within a limit below what an order alone can keep: activations wait on the host.

An order in which weight gradients wait fills its bubbles with them, but what a W still needs is on the device
all the while, where no copy helps.  So the orders of the published families are tried with fewer and fewer of
them waiting, on the ranks that are above their limit, until the copies of ``schedule.offload`` keep it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.check import InvalidSchedule, check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.offload import over, within
from megatron_pp_ext.schedule.simulate import Timeline


def shortest_within(schedules: Sequence[Schedule], costs: Costs, limits: Sequence[float]) -> Timeline | None:
    """Return the shortest step with copies that keeps ``limits``, in one of the orders of ``schedules``.

    ``costs`` are those of the finest cut, with the seconds of copies (``StageCosts.copy``), and ``limits``
    are in the unit of their activations.  None where no order keeps the limits.
    """
    found = (
        timeline
        for schedule in schedules
        for timeline in _planned(schedule, costs.merged(schedule.placement.stages), limits)
    )
    return min(found, key=lambda timeline: timeline.makespan, default=None)


def _planned(schedule: Schedule, costs: Costs, limits: Sequence[float]) -> Iterator[Timeline]:
    """Yield ``schedule`` with copies as soon as it keeps ``limits``, or nothing where it never does."""
    waiting = [max(_waiting(order)) for order in schedule.orders]
    while True:
        try:
            hurried = replace(schedule, orders=tuple(map(_hurried, schedule.orders, waiting)))
            check(hurried)
        except InvalidSchedule:
            return
        timeline = within(hurried, costs, limits)
        if not over(timeline, limits):
            yield timeline
            return
        above = [
            rank
            for rank, (peak, limit) in enumerate(zip(timeline.peak_memory, limits, strict=True))
            if peak > limit and waiting[rank] > 1
        ]
        if not above:
            return
        for rank in above:
            waiting[rank] -= 1


def _waiting(order: Sequence[Action]) -> Iterator[int]:
    """Yield how many weight gradients wait after each action."""
    count = 0
    for action in order:
        count += (action.kind is Kind.I) - (action.kind is Kind.W)
        yield count


def _hurried(order: Sequence[Action], most: int) -> tuple[Action, ...]:
    """Return ``order`` with weight gradients earlier, so that at most ``most`` wait, the oldest first."""
    waiting: list[Action] = []
    found = []
    for action in order:
        stage, kind, microbatch = action
        if kind is Kind.W:
            if action in waiting:
                waiting.remove(action)
                found.append(action)
            continue
        if kind is Kind.I:
            while len(waiting) >= most:
                found.append(waiting.pop(0))
            waiting.append(Action(stage, Kind.W, microbatch))
        found.append(action)
    return tuple(found)
