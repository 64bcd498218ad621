"""The choice of activations that wait on the host, and of when they return (arXiv 2503.01328, section 3).

The order of a schedule stays as it is, and so do its times where copies fit into the time for which
activations wait for their backward.  Each rank chooses for itself:

1. What waits longest leaves first: the stages are taken in the order of their mean wait, and of the last one
   that is taken in part, microbatches at equal distances, so that the copies follow each other evenly.
2. The copies to the host run one after the other, in the order of the forwards.
3. A copy back ends as late as neither its backward waits nor a copy behind it on the engine is put off.  It
   is launched at the last end of an action before that, since it takes memory from there on.
4. The memory is given up at the first start of an action behind the end of the copy, so that nothing waits.
5. What would not be gone before its copy back is launched stays on the device: every other one of these,
   until none is left.
6. What is back already at the rank's fullest moment stays as well, as long as that lowers the peak: before a
   long idle time a copy back is launched early.

So no plan makes a step longer.  For a memory limit a rank sends away as little as keeps it.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from statistics import mean
from typing import NamedTuple

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule, together
from megatron_pp_ext.schedule.copies import Copies, Kept
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import Copied, Timeline, simulate

_TRIES = 32
"""How often a copy that is back at the fullest moment is left out to see whether the rank then keeps less."""

_ROUNDING = 1e-9
"""The part of a step or of a limit that rounding may add up to."""


def share_away(timeline: Timeline) -> float:
    """Return the part of all activations of a step that are copied to the host."""
    amounts = [stage.activation for stage in timeline.costs.stages]
    away = sum(amounts[stage] for stage, _ in timeline.schedule.copies.back)
    return away / (timeline.schedule.microbatches * sum(amounts))


def least_makespan(schedule: Schedule, costs: Costs) -> float:
    """Return a time below which no step with the copies of ``schedule`` is, whenever they are launched.

    It is that of the order without copies, or more where a copy engine is the slowest: it begins when the
    first forward with a copy has ended, and behind the last copy come at least a copy back and a backward.
    """
    alone = _alone(schedule, costs)
    least = alone.makespan
    for events in alone.events:
        away = [event for event in events if event.action[::2] in schedule.copies.back]
        forwards = [event for event in away if event.action.kind is Kind.F]
        if forwards:
            stages = [costs.stages[event.action.stage] for event in forwards]
            first = min(event.end for event in forwards) - alone.start
            behind = min(stage.copy for stage in stages) + min(stage.seconds(Kind.B) for stage in stages)
            least = max(least, first + sum(stage.copy for stage in stages) + behind)
    return least


def with_share(schedule: Schedule, costs: Costs, share: float) -> Timeline:
    """Return ``schedule`` with this ``share`` of its activations on the host, or with less, simulated.

    What stays although it is asked for would make its backward wait.  Each rank sends the same share, but
    where one has not enough that can leave, the others send more.  ValueError for a share that is not above 0
    and at most 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share of activations on the host is {share:g}: give one above 0, at most 1")
    alone = _alone(schedule, costs)
    ranks = [_Rank(alone, rank) for rank in range(len(alone.events))]
    rooms = [len(rank.copies(len(rank.waits))) for rank in ranks]
    counts = _leveled(rooms, round(share * sum(len(rank.waits) for rank in ranks)))
    return _timed(alone, [rank.copies(count) for rank, count in zip(ranks, counts, strict=True)])


def within(schedule: Schedule, costs: Costs, limits: Sequence[float]) -> Timeline:
    """Return ``schedule`` with as few copies as keep each rank within its limit, simulated.

    A rank that no copies keep within it, as ``over`` tells, has all that can leave.  ``limits`` are in the
    unit of ``StageCosts.activation``, and are held against ``Timeline.peak_memory``.
    """
    alone = _alone(schedule, costs)
    messages = alone.peak_messages if costs.message else (0,) * len(limits)
    rooms = [limit - costs.message * count for limit, count in zip(limits, messages, strict=True)]
    return _timed(alone, [_Rank(alone, rank).least(room) for rank, room in enumerate(rooms)])


def over(timeline: Timeline, limits: Sequence[float]) -> float:
    """Return by how much the fullest rank exceeds its limit; 0 where all keep theirs."""
    above = (peak - limit * (1 + _ROUNDING) for peak, limit in zip(timeline.peak_memory, limits, strict=True))
    return max(0.0, *above)


class _Wait(NamedTuple):
    """What waits from ``since`` to ``until``, and takes so many ``seconds`` to copy.

    Its copy back may be launched at those of the rank's steps that are from ``earliest`` to ``latest``.
    """

    kept: Kept
    seconds: float
    since: float
    until: float
    earliest: int
    latest: int


class _Return(NamedTuple):
    """A copy with its times, and the actions before which the memory is given up and comes back.

    ``is_useful`` says whether there is any time between the two.
    """

    times: Copied
    gone: Action
    before: Action
    is_useful: bool


class _Rank:
    """A rank of a step with its times, for which its copies are chosen."""

    def __init__(self, timeline: Timeline, rank: int) -> None:
        self._timeline, self._rank = timeline, rank
        order, events = timeline.schedule.orders[rank], timeline.events[rank]
        begins = [0, *accumulate(map(len, together(order, timeline.schedule.paired)))][:-1]
        self._steps = [order[place] for place in begins]
        self._starts = [events[place].start for place in begins]
        self._launches = [events[place - 1].end if place else timeline.start for place in begins]
        forwards: dict[Kept, tuple[int, float]] = {}
        self.waits: list[_Wait] = []
        for place, ((stage, kind, microbatch), start, end) in enumerate(events):
            step = bisect_right(begins, place) - 1
            if kind is Kind.F:
                forwards[stage, microbatch] = step + 1, end
            elif kind in (Kind.I, Kind.B):
                earliest, since = forwards[stage, microbatch]
                seconds = timeline.costs.stages[stage].copy
                self.waits.append(_Wait((stage, microbatch), seconds, since, start, earliest, step))

    def copies(self, count: int) -> list[_Return]:
        """Return so many copies, or fewer where not all are of use, with which the rank keeps little."""
        waits = self.waits
        best = self._useful(waits, count)
        for _ in range(_TRIES):
            peak, moment = self._peak(best)
            early = [one.times[:2] for one in best if one.times.launched <= moment < one.times.back[1]]
            fewer = [[wait for wait in waits if wait.kept not in some] for some in (early[:1], early)]
            lower = [
                (found, left)
                for left in fewer
                if self._peak(found := self._useful(left, count))[0] < peak * (1 - _ROUNDING)
            ]
            if not lower:
                break
            best, waits = lower[0]
        return best

    def _useful(self, waits: Sequence[_Wait], count: int) -> list[_Return]:
        """Return so many copies of ``waits``, or of as many as are gone before they are launched back."""
        while True:
            found = self._placed(_chosen(waits, count))
            staying = {one.times[:2] for one in [one for one in found if not one.is_useful][::2]}
            if not staying:
                return found
            waits = [wait for wait in waits if wait.kept not in staying]

    def least(self, limit: float) -> list[_Return]:
        """Return as few copies as keep the rank within ``limit``, or all that are of use."""
        limit *= 1 + _ROUNDING
        low, high = 0, len(self.waits)
        choose: Callable[[int], list[_Return]] = partial(self._useful, self.waits)
        best = choose(high)
        if self._peak(best)[0] > limit:
            choose = self.copies
            best = choose(high)
        while low < high and self._peak(best)[0] <= limit:
            middle = (low + high) // 2
            found = choose(middle)
            if self._peak(found)[0] <= limit:
                best, high = found, middle
            else:
                low = middle + 1
        return best

    def _peak(self, copies: Iterable[_Return]) -> tuple[float, float]:
        """Return the most that the rank keeps at one time, and when it first does."""
        own = [()] * self._rank + [tuple(one.times for one in copies)]
        curve = replace(self._timeline, copies=tuple(own)).memory(self._rank)
        moment, peak = max(curve, key=lambda step: step[1])
        return peak, moment

    def _placed(self, waits: Sequence[_Wait]) -> list[_Return]:
        """Return the copies of ``waits``, which are in the order of their backwards."""
        out: dict[Kept, tuple[float, float]] = {}
        free = 0.0
        for wait in sorted(waits, key=lambda wait: wait.since):
            start = max(free, wait.since)
            free = start + wait.seconds
            out[wait.kept] = start, free
        rounding = _ROUNDING * self._timeline.end
        start = float("inf")
        launches: dict[Kept, int] = {}
        returns: dict[Kept, tuple[float, float]] = {}
        for wait in reversed(waits):
            start = min(start, wait.until) - wait.seconds
            launch = bisect_right(self._launches, start + rounding) - 1
            launches[wait.kept] = min(max(launch, wait.earliest), wait.latest)
            returns[wait.kept] = start, start + wait.seconds
        launching, found = set(launches.values()), []
        for wait in waits:
            launch, away = launches[wait.kept], out[wait.kept][1]
            gone = bisect_left(self._starts, away - rounding)
            if gone in launching and self._launches[gone] < away - rounding:
                gone += 1  # no copy back has to wait for this one to the host
            gone = min(gone, launch)
            given_up = max(away, self._launches[gone])
            times = Copied(*wait.kept, out[wait.kept], given_up, self._launches[launch], returns[wait.kept])
            is_useful = given_up < self._launches[launch] - rounding
            found.append(_Return(times, self._steps[gone], self._steps[launch], is_useful))
        return found


def _chosen(waits: Sequence[_Wait], count: int) -> list[_Wait]:
    """Return ``count`` of ``waits``, or all if there are fewer: those of the stages that wait longest."""
    of_stage: dict[int, list[_Wait]] = defaultdict(list)
    for wait in waits:
        of_stage[wait.kept[0]].append(wait)
    chosen: set[Kept] = set()
    for stage in sorted(of_stage, key=lambda stage: -mean(one.until - one.since for one in of_stage[stage])):
        own = of_stage[stage]
        some = min(count - len(chosen), len(own))
        chosen |= {own[(2 * at + 1) * len(own) // (2 * some)].kept for at in range(some)}
    return [wait for wait in waits if wait.kept in chosen]


def _leveled(rooms: Sequence[int], total: int) -> list[int]:
    """Return ``total`` in equal parts, none larger than its room; the first have one more where it is odd."""
    level = 0
    while sum(min(room, level + 1) for room in rooms) <= min(total, sum(rooms) - 1):
        level += 1
    left = total - sum(min(room, level) for room in rooms)
    higher = [at for at, room in enumerate(rooms) if room > level][:left]
    return [min(room, level) + (at in higher) for at, room in enumerate(rooms)]


def _alone(schedule: Schedule, costs: Costs) -> Timeline:
    return simulate(replace(schedule, copies=Copies()), costs)


def _timed(alone: Timeline, copies: Iterable[Iterable[_Return]]) -> Timeline:
    """Return the step ``alone`` with ``copies``, simulated."""
    found = [one for rank in copies for one in rank]
    gone, back = ({one.times[:2]: getattr(one, name) for one in found} for name in ("gone", "before"))
    return simulate(replace(alone.schedule, copies=Copies(back, gone)), alone.costs)
