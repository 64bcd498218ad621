"""Which activations go to the host and when they return, for one rank and all (arXiv 2503.01328)."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from megatron_pp_ext.schedule.actions import Action, Copies, Kept, Kind, Schedule, together
from megatron_pp_ext.schedule.check import InvalidSchedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import Copied, Timeline, changes_by, simulate

ROUNDING = 1e-9
"""The part of a step or of a limit that rounding may add up to."""

_TRIES = 32
"""How often a copy that is back at the fullest moment is left out to see whether the rank then keeps less."""


class Wait(NamedTuple):
    """Activations that wait from ``since`` to ``until``, and take so many ``seconds`` to copy.

    Its copy back may be launched at the rank's steps from ``earliest`` to ``latest``.
    """

    kept: Kept
    seconds: float
    since: float
    until: float
    earliest: int
    latest: int


class PlannedCopy(NamedTuple):
    """An offloaded activation, with its times, and the actions before which it is freed and reloaded.

    ``is_useful`` is whether there is any time between the two.
    """

    times: Copied
    freed_before: Action
    reloaded_before: Action
    is_useful: bool


class RankCopies:
    """A rank of a step with its times, for which its copies are chosen.

    ``launches`` are its actions, the two of a pair together, and ``waits`` its waiting activations, in the
    order of their backwards.

    1. The longest waits are offloaded first: the stages are taken in the order of their mean wait, and of the
       last one that is taken in part, microbatches at equal distances, so that the copies follow each other
       evenly.
    2. The copies to the host run one after the other, in the order of the forwards.
    3. A copy back ends as late as neither its backward waits nor a copy after it on the engine is put off.
       It is launched at the last end of an action before that, since it takes memory from there on.
    4. The memory is freed at the first start of an action after the end of the copy, so that nothing waits.
    5. An activation that would not be freed before its reload is launched stays on the device: every other
       one, until none is left.
    6. An activation reloaded before the rank's fullest moment stays as well, as long as that lowers the peak:
       before a long idle time a copy back is launched early.
    """

    def __init__(self, timeline: Timeline, rank: int) -> None:
        self._timeline, self._changes = timeline, timeline.changes(rank)
        order, events = timeline.schedule.orders[rank], timeline.events[rank]
        self.launches = list(together(order, timeline.schedule.paired))
        begins = [0, *accumulate(map(len, self.launches))][:-1]
        self._steps = [order[place] for place in begins]
        self._starts = [events[place].start for place in begins]
        self._idle_from = [events[place - 1].end if place else timeline.start for place in begins]
        forwards: dict[Kept, tuple[int, float]] = {}
        self.waits: list[Wait] = []
        for place, ((stage, kind, microbatch), start, end) in enumerate(events):
            step = bisect_right(begins, place) - 1
            if kind is Kind.F:
                forwards[stage, microbatch] = step + 1, end
            elif kind in (Kind.I, Kind.B):
                earliest, since = forwards[stage, microbatch]
                seconds = timeline.costs.stages[stage].copy
                self.waits.append(Wait((stage, microbatch), seconds, since, start, earliest, step))

    def copies(self, count: int) -> list[PlannedCopy]:
        """Return so many copies, or fewer where not all are of use, with which the rank keeps little."""
        waits = self.waits
        best = self._useful(waits, count)
        peak, moment = self._peak(best)
        for _ in range(_TRIES):
            early = [copy.times[:2] for copy in best if copy.times.launched <= moment < copy.times.back[1]]
            for dropped in (early[:1], early):
                remaining = [wait for wait in waits if wait.kept not in dropped]
                choice = self._useful(remaining, count)
                lower, at = self._peak(choice)
                if lower < peak * (1 - ROUNDING):
                    best, waits, peak, moment = choice, remaining, lower, at
                    break
            else:
                break
        return best

    def late(self, count: int) -> list[PlannedCopy]:
        """Return so many copies, including some whose end delays a backward."""
        return self._placed(_chosen(self.waits, count))

    def _useful(self, waits: Sequence[Wait], count: int) -> list[PlannedCopy]:
        """Return so many copies of ``waits``, or of as many as are freed before they are reloaded."""
        while True:
            copies = self._placed(_chosen(waits, count))
            staying = {copy.times[:2] for copy in [copy for copy in copies if not copy.is_useful][::2]}
            if not staying:
                return copies
            waits = [wait for wait in waits if wait.kept not in staying]

    def least(self, limit: float) -> list[PlannedCopy]:
        """Return as few copies as keep the rank within ``limit``, or all that are of use."""
        limit *= 1 + ROUNDING
        if self.peak([]) <= limit:
            return []
        low, high = 0, len(self.waits)
        choose: Callable[[int], list[PlannedCopy]] = partial(self._useful, self.waits)
        best = choose(high)
        if self.peak(best) > limit:
            choose = self.copies
            best = choose(high)
            if self.peak(best) > limit:
                return best
        while low < high:
            middle = (low + high) // 2
            copies = choose(middle)
            if self.peak(copies) <= limit:
                best, high = copies, middle
            else:
                low = middle + 1
        return best

    def peak(self, copies: Iterable[PlannedCopy]) -> float:
        """Return the most that the rank keeps at one time with ``copies``, in the unit of activations."""
        return self._peak(copies)[0]

    def _peak(self, copies: Iterable[PlannedCopy]) -> tuple[float, float]:
        """Return the most that the rank keeps at one time, and when it first does."""
        by_copies = changes_by((copy.times for copy in copies), self._timeline.costs)
        changes = sorted([*self._changes, *by_copies])
        live = list(accumulate(change for _, change in changes))
        peak = max(live, default=0.0)
        return peak, changes[live.index(peak)][0] if changes else self._timeline.start

    def _placed(self, waits: Sequence[Wait]) -> list[PlannedCopy]:
        """Return the copies of ``waits``, which are in the order of their backwards."""
        out: dict[Kept, tuple[float, float]] = {}
        free = 0.0
        for wait in sorted(waits, key=attrgetter("since")):
            start = max(free, wait.since)
            free = start + wait.seconds
            out[wait.kept] = start, free
        rounding = ROUNDING * self._timeline.end
        start = float("inf")
        launches: dict[Kept, int] = {}
        returns: dict[Kept, tuple[float, float]] = {}
        for wait in reversed(waits):
            start = min(start, wait.until) - wait.seconds
            possible = max(start, out[wait.kept][1])  # after the copy to the host, where that is late
            launch = bisect_right(self._idle_from, possible + rounding) - 1
            launches[wait.kept] = min(max(launch, wait.earliest), wait.latest)
            returns[wait.kept] = start, start + wait.seconds
        launching, copies = set(launches.values()), []
        for wait in waits:
            launch, copied = launches[wait.kept], out[wait.kept][1]
            place = bisect_left(self._starts, copied - rounding)
            if place in launching and self._idle_from[place] < copied - rounding:
                place += 1  # no copy back has to wait for this one to the host
            place = min(place, launch)
            freed = max(copied, self._idle_from[place])
            times = Copied(*wait.kept, out[wait.kept], freed, self._idle_from[launch], returns[wait.kept])
            is_useful = freed < self._idle_from[launch] - rounding
            copies.append(PlannedCopy(times, self._steps[place], self._steps[launch], is_useful))
        return copies


def _chosen(waits: Sequence[Wait], count: int) -> list[Wait]:
    """Return ``count`` of ``waits``, or all if there are fewer, of the stages that wait longest."""
    of_stage: dict[int, list[Wait]] = defaultdict(list)
    for wait in waits:
        of_stage[wait.kept[0]].append(wait)
    selected: set[Kept] = set()
    for stage in sorted(
        of_stage, key=lambda stage: -fmean(wait.until - wait.since for wait in of_stage[stage])
    ):
        stage_waits = of_stage[stage]
        number = min(count - len(selected), len(stage_waits))
        selected |= {
            stage_waits[(2 * at + 1) * len(stage_waits) // (2 * number)].kept for at in range(number)
        }
    return [wait for wait in waits if wait.kept in selected]


def share_offloaded(timeline: Timeline) -> float:
    """Return the part of all activations of a step that are copied to the host."""
    amounts = [stage.activation for stage in timeline.costs.stages]
    offloaded = sum(amounts[stage] for stage, _ in timeline.schedule.copies.reloads)
    return offloaded / (timeline.schedule.microbatches * sum(amounts))


def with_share(schedule: Schedule, costs: Costs, share: float) -> Timeline:
    """Return ``schedule`` with this ``share`` of its activations on the host, or with less, simulated.

    What stays although it is asked for would make its backward wait.  Each rank offloads the same share, but
    where one has not enough that can be, the others offload more.  ValueError for a share that is not above 0
    and at most 1.

    The order of the schedule stays as it is, and so do its times where copies fit into the time for which
    activations wait for their backward: no plan makes a step longer.  ``with_whole_share`` and
    ``within_limits`` have what asks for more.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share of activations on the host is {share:g}: give one above 0, at most 1")
    alone = without_copies(schedule, costs)
    ranks = [RankCopies(alone, rank) for rank in range(len(alone.events))]
    capacities = [len(rank.copies(len(rank.waits))) for rank in ranks]
    counts = balanced(capacities, round(share * sum(len(rank.waits) for rank in ranks)))
    return timed(alone, [rank.copies(count) for rank, count in zip(ranks, counts, strict=True)])


def within(schedule: Schedule, costs: Costs, limits: Sequence[float]) -> Timeline:
    """Return ``schedule`` with as few copies as keep each rank within its limit, simulated.

    A rank that no copies keep within it, by ``over``, offloads all that can be.  ``limits`` are in the
    unit of ``StageCosts.activation``, and are held against ``Timeline.peak_memory``.
    """
    alone = without_copies(schedule, costs)
    return timed(alone, least_copies(alone, limits)[0])


def least_copies(step: Timeline, limits: Sequence[float]) -> tuple[list[list[PlannedCopy]], list[int]]:
    """Return as few copies as keep each rank of ``step`` within its limit, and the ranks that none keep."""
    copies, above = [], []
    for rank, limit in enumerate(without_messages(step, limits)):
        plan = RankCopies(step, rank)
        copies.append(plan.least(limit))
        if plan.peak(copies[rank]) > limit * (1 + ROUNDING):
            above.append(rank)
    return copies, above


def without_messages(timeline: Timeline, limits: Sequence[float]) -> list[float]:
    """Return the memory limits of ranks less their messages."""
    message = timeline.costs.message
    counts = timeline.peak_messages if message else (0,) * len(limits)
    return [limit - message * count for limit, count in zip(limits, counts, strict=True)]


def over(timeline: Timeline, limits: Sequence[float]) -> float:
    """Return by how much the fullest rank exceeds its limit; 0 where all keep theirs."""
    above = (peak - limit * (1 + ROUNDING) for peak, limit in zip(timeline.peak_memory, limits, strict=True))
    return max(0.0, *above)


def balanced(capacities: Sequence[int], total: int) -> list[int]:
    """Return ``total`` in equal parts, none above its capacity; the first have one more where it is odd."""
    level = 0
    while sum(min(capacity, level + 1) for capacity in capacities) <= min(total, sum(capacities) - 1):
        level += 1
    remaining = total - sum(min(capacity, level) for capacity in capacities)
    higher = [at for at, capacity in enumerate(capacities) if capacity > level][:remaining]
    return [min(capacity, level) + (at in higher) for at, capacity in enumerate(capacities)]


def without_copies(schedule: Schedule, costs: Costs) -> Timeline:
    """Return ``schedule`` with all activations on the device, simulated."""
    return simulate(replace(schedule, copies=Copies()), costs)


def timed(step: Timeline, copies: Iterable[Iterable[PlannedCopy]]) -> Timeline:
    """Return ``step`` with these ``copies`` of its ranks and no others, simulated."""
    planned = [copy for rank in copies for copy in rank]
    reloads = {copy.times[:2]: copy.reloaded_before for copy in planned}
    frees = {copy.times[:2]: copy.freed_before for copy in planned}
    return simulate(replace(step.schedule, copies=Copies(reloads, frees)), step.costs)


_FURTHEST = 8
"""The most microbatches by which forwards are tried ahead."""

_ROUNDS = 4
"""How often copies are planned, from the second time on by the times of the step that they have made."""


def with_whole_share(schedule: Schedule, costs: Costs, share: float) -> Timeline:
    """Return the shortest step found in which this ``share`` of activations is offloaded, simulated.

    It may have forwards ahead.  ValueError for a share that is not above 0 and at most 1.

    An activation that waits for less than a copy there and one back waits longer where each stage does its
    forwards some microbatches ahead.  It then waits on the host, and mostly the step stays as long as it is.
    Where that is not enough for a share, backwards wait for copies.
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

    Arguments are as for ``within``, whose plan stays where it keeps the limits.  None where none
    does: activations between an I and its W stay on the device.

    A limit is kept at every place of a rank's order.  Where a plan that is free exceeds it, a rank reloads
    later, frees earlier or offloads more, and waits for copies that have not ended by then.
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
