"""The copies of one rank, chosen by the times of a step (arXiv 2503.01328, section 3).

1. The longest waits are offloaded first: the stages are taken in the order of their mean wait, and of the
   last one that is taken in part, microbatches at equal distances, so that the copies follow each other
   evenly.
2. The copies to the host run one after the other, in the order of the forwards.
3. A copy back ends as late as neither its backward waits nor a copy after it on the engine is put off.  It
   is launched at the last end of an action before that, since it takes memory from there on.
4. The memory is freed at the first start of an action after the end of the copy, so that nothing waits.
5. An activation that would not be freed before its reload is launched stays on the device: every other one,
   until none is left.
6. An activation reloaded before the rank's fullest moment stays as well, as long as that lowers the peak:
   before a long idle time a copy back is launched early.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from megatron_pp_ext.schedule.actions import Action, Kind, together
from megatron_pp_ext.schedule.copies import Kept
from megatron_pp_ext.schedule.simulate import Copied, Timeline, changes_by

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
