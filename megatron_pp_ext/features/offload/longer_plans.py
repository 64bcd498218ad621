"""Plans of copies that may make a step longer, by as little as is found, where more is asked than is free.

An activation that waits for less than a copy there and one back waits longer where each stage does its
forwards some microbatches ahead.  It then waits on the host, and mostly the step stays as long as it is.
Where that is not enough for a share, backwards wait for copies.

A limit is kept at every place of a rank's order.  Where a plan that is free exceeds it, a rank reloads later,
frees earlier or offloads more, and waits for copies that have not ended by then.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from megatron_pp_ext.features.offload.free_plans import (
    balanced,
    over,
    timed,
    with_share,
    within,
    without_copies,
    without_messages,
)
from megatron_pp_ext.features.offload.rank_copies import ROUNDING, RankCopies
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.check import InvalidSchedule
from megatron_pp_ext.schedule.copies import Copies, Kept
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import Timeline, simulate

_FURTHEST = 8
"""The most microbatches by which forwards are tried ahead."""

_ROUNDS = 4
"""How often copies are planned, from the second time on by the times of the step that they have made."""


def with_whole_share(schedule: Schedule, costs: Costs, share: float) -> Timeline:
    """Return the shortest step found in which this ``share`` of activations is offloaded, simulated.

    It may have forwards ahead.  ValueError for a share that is not above 0 and at most 1.
    """
    count_of_copies = round(share * schedule.placement.stages * schedule.microbatches)
    shortest = without_copies(schedule, costs).makespan * (1 + ROUNDING)
    steps: list[Timeline] = []
    for count in range(min(_FURTHEST, schedule.microbatches)):
        try:
            ahead = forwards_ahead(schedule, count)
            free = with_share(ahead, costs, share)
        except InvalidSchedule:  # a file may have stages that take the microbatches in different orders
            break
        is_whole = len(free.schedule.copies.reloads) >= count_of_copies
        steps.append(free if is_whole else _late(ahead, costs, count_of_copies))
        if is_whole or steps[-1].makespan <= shortest:
            break
    return min(steps, key=lambda timeline: (timeline.makespan, max(timeline.peak_memory)))


def within_limits(schedule: Schedule, costs: Costs, limits: Sequence[float]) -> Timeline | None:
    """Return the shortest step found of ``schedule`` that keeps each rank within its limit, simulated.

    Arguments are as for ``offload.within``, whose plan stays where it keeps the limits.  None where none
    does: activations between an I and its W stay on the device.
    """
    free = within(schedule, costs, limits)
    if not over(free, limits):
        return free
    step = without_copies(schedule, costs)
    budgets = without_messages(step, limits)
    steps: list[Timeline] = []
    for _ in range(_ROUNDS):
        reloads: dict[Kept, Action] = {}
        frees: dict[Kept, Action] = {}
        for rank, budget in enumerate(budgets):
            plan = _Places(step, rank)
            if not plan.keeps(budget * (1 + ROUNDING)):
                return None
            reloads |= plan.actions(plan.reloads)
            frees |= plan.actions(plan.frees)
        step = simulate(replace(step.schedule, copies=Copies(reloads, frees)), costs)
        steps.append(step)
    return min(steps, key=lambda timeline: timeline.makespan)


def forwards_ahead(schedule: Schedule, count: int) -> Schedule:
    """Return ``schedule``, which has no copies, with each stage's forwards ``count`` microbatches ahead.

    A forward stands where the one of ``count`` microbatches before it stood, and the first ones stand
    together.  So no ranks wait for each other in a circle, where all stages take the microbatches in one
    order (``check.require_one_forward_order``).
    """
    orders, paired = [], set[Action]()
    for order in schedule.orders:
        forwards = defaultdict[int, list[Action]](list)
        for action in order:
            if action.kind is Kind.F:
                forwards[action.stage].append(action)
        actions: list[Action] = []
        for action in order:
            if action.kind is not Kind.F:
                actions.append(action)
                continue
            of_stage = forwards[action.stage]
            place = of_stage.index(action)
            last = place + count
            actions += of_stage[last if place else 0 : last + 1]
            if action in schedule.paired and last < len(of_stage):
                paired.add(of_stage[last])
        orders.append(tuple(actions))
    return replace(schedule, orders=tuple(orders), paired=frozenset(paired))


def _late(schedule: Schedule, costs: Costs, copies: int) -> Timeline:
    """Return the shortest step found with so many copies, for which backwards may wait."""
    step = without_copies(schedule, costs)
    steps: list[Timeline] = []
    for _ in range(_ROUNDS):
        ranks = [RankCopies(step, rank) for rank in range(schedule.ranks)]
        counts = balanced([len(rank.waits) for rank in ranks], copies)
        step = timed(step, [rank.late(count) for rank, count in zip(ranks, counts, strict=True)])
        steps.append(step)
    return min(steps, key=lambda timeline: timeline.makespan)


class _Places:
    """The copies of a rank by the places of its launches: ``frees`` and ``reloads``."""

    def __init__(self, step: Timeline, rank: int) -> None:
        self._costs, self._copies = step.costs, RankCopies(step, rank)
        self._starts = {event.action: event.start for event in step.events[rank]}
        self._waits = {wait.kept: wait for wait in self._copies.waits}
        self.frees: dict[Kept, int] = {}
        self.reloads: dict[Kept, int] = {}

    def actions(self, places: dict[Kept, int]) -> dict[Kept, Action]:
        """Return the first actions at ``places``."""
        return {activation: self._copies.launches[place][0] for activation, place in places.items()}

    def keeps(self, limit: float) -> bool:
        """Choose copies, and return whether the rank keeps ``limit`` with them."""
        launches = self._copies.launches
        place_of = {action: place for place, launch in enumerate(launches) for action in launch}
        for copy in self._copies.least(limit):
            activation = copy.times[:2]
            self.frees[activation], self.reloads[activation] = (
                place_of[copy.freed_before],
                place_of[copy.reloaded_before],
            )
        held = 0.0
        for place, launch in enumerate(launches):
            growth = sum(map(self._costs.growth, launch))
            held += growth
            held += self._amount(self.reloads, place) - self._amount(self.frees, place)
            while held > limit:
                freed = self._makes_room(place)
                if not freed:
                    return False
                held -= freed
            held += sum(map(self._costs.kept, launch)) - growth
        return True

    def _makes_room(self, place: int) -> float:
        """Change the copies so that the rank keeps less at ``place``, and return how much; 0 if none does."""
        waits, frees, reloads = self._waits, self.frees, self.reloads
        # What has to wait least: a copy back for a backward that is furthest, or the first copy to the host.
        if later := [
            activation for activation in reloads if reloads[activation] == place < waits[activation].latest
        ]:
            changed = max(later, key=lambda activation: waits[activation].latest)
            reloads[changed] += 1
        elif earlier := [
            activation for activation in frees if waits[activation].earliest <= place < frees[activation]
        ]:
            changed = min(earlier, key=lambda activation: waits[activation].earliest)
            frees[changed] = place
        elif more := [
            activation
            for activation, wait in waits.items()
            if activation not in frees and wait.earliest <= place < wait.latest
        ]:
            now = self._starts[self._copies.launches[place][0]]
            changed = max(more, key=lambda activation: self._spare(activation, now))
            frees[changed], reloads[changed] = place, waits[changed].latest
        else:
            return 0.0
        return self._costs.stages[changed[0]].activation

    def _amount(self, places: dict[Kept, int], place: int) -> float:
        return sum(
            self._costs.stages[activation[0]].activation for activation, at in places.items() if at == place
        )

    def _spare(self, activation: Kept, now: float) -> float:
        """Return the time that is left for a copy to the host by ``now``, or for one back from there on."""
        wait = self._waits[activation]
        return min(now - wait.since, wait.until - now) - wait.seconds
