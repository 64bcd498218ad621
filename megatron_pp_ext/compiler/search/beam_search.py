"""Put the actions in one window of time, or all actions, in a better order by beam search.

The actions before the window stay as they are.  Those after it keep their order, from which follows how
much time every rank and every message needs after the window.  The search fills the window action by
action, in the order of starts, and follows many partial orders side by side.  It drops a partial order
that cannot end in time, and one that is nowhere ahead of another one that has done the same actions.  Of
the others it follows those with the least idle time.

Only active schedules are considered (Giffler and Thompson, Operations Research 8(4), 1960): a rank never
waits so long that it could have done an input gradient or a W in the meantime.  A forward may wait, since
it takes memory.  A rank does its W in the order of its I.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import itemgetter, le
from random import Random
from typing import NamedTuple

from megatron_pp_ext.compiler.search.integer_timing import TimedOrders, times_to_end
from megatron_pp_ext.compiler.search.problem import NEVER, Orders, Problem, Table, with_value

_GREEDS = (0, 1, 4)
"""Weights of a partial order's bound against its idle time; no single one is best everywhere."""


class _State(NamedTuple):
    """A partial order: the actions before the window and some of those in it.

    No complete order that follows from it has a makespan below ``bound``.  Its last action is ``code``,
    which starts at ``now`` on ``rank``; ``parent`` has those before it.  Each rank has the time at which it
    is ``free``, its ``live`` memory, its pending W (``weights``), the time that its part of the window still
    takes (``left``) and its ``options`` for the next action, pairs of (earliest start, code).  ``done``
    counts the actions of each code; ``inbox`` has the arrivals of the next inputs of each station.
    """

    bound: int
    now: int
    rank: int
    code: int
    parent: "_State | None"
    free: tuple[int, ...]
    live: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    left: tuple[int, ...]
    options: tuple[tuple[tuple[int, int], ...], ...]
    done: tuple[int, ...]
    inbox: tuple[tuple[int, ...], ...]


class Window:
    """The actions of ``orders`` (split backwards only) that start in [``since``, ``until``).

    ``size`` is their number.  ``visited`` counts the partial orders that searches have extended, which
    measures their effort: each takes about as long.
    """

    def __init__(self, problem: Problem, orders: Orders, timed: TimedOrders, since: int, until: int) -> None:
        self.problem = problem
        self.orders = orders
        self.cuts = [(bisect_left(starts, since), bisect_left(starts, until)) for starts in timed.starts]
        self.size = sum(stop - start for start, stop in self.cuts)
        self.visited = 0
        codes = problem.stations + problem.placement.stages
        first, self.last = [0] * codes, [0] * codes
        for order, (start, stop) in zip(orders, self.cuts, strict=True):
            for code in order[:start]:
                first[code] += 1
            for code in order[:stop]:
                self.last[code] += 1
        rest = times_to_end(problem, orders, timed)
        # The time from the end of each rank's part of the window to the end of all.
        self.after = [
            rest[order[stop]][self.last[order[stop]]] if stop < len(order) else 0
            for order, (_, stop) in zip(orders, self.cuts, strict=True)
        ]
        self.least = self._least(rest, first)
        self.start = self._start(timed, rest, first)

    def _least(self, rest: Table, first: list[int]) -> Table:
        """Return a lower bound on the time from the start of each action in the window to the end of all."""
        problem, last = self.problem, self.last
        least = [list(times) for times in rest]
        for code in reversed(range(len(rest))):
            for microbatch in range(first[code], last[code]):
                then = self.after[problem.home[code]]
                if code < problem.stations - 1:
                    then = max(then, problem.delay[code] + least[code + 1][microbatch])
                if problem.placement.stages <= code < problem.stations:
                    then = max(then, least[problem.weight_of(code)][microbatch])
                least[code][microbatch] = problem.duration[code] + then
        return least

    def _start(self, timed: TimedOrders, rest: Table, first: list[int]) -> _State:
        """Return the state before the first action of the window."""
        problem = self.problem
        duration = problem.duration
        sent = [problem.microbatches, *first]
        free, live, left, weights = [], [], [], []
        for order, starts, (start, stop) in zip(self.orders, timed.starts, self.cuts, strict=True):
            free.append(starts[start - 1] + duration[order[start - 1]] if start else 0)
            live.append(sum(problem.taken[code] - problem.freed[code] for code in order[:start]))
            left.append(sum(duration[code] for code in order[start:stop]))
            pending: list[int] = []
            for code in order[:start]:
                if code >= problem.stations:
                    pending.remove(code)
                elif code >= problem.placement.stages:
                    pending.append(problem.weight_of(code))
            weights.append(tuple(pending))
        # No order of the window changes messages from before it to after it.
        bound = max(
            (
                timed.arrived[station][microbatch] + rest[station][microbatch]
                for station in range(problem.stations)
                for microbatch in range(self.last[station], sent[station])
            ),
            default=0,
        )
        inbox = [
            tuple(timed.arrived[station][first[station] : min(self.last[station], sent[station])])
            for station in range(problem.stations)
        ]
        options = [
            self._options(rank, free[rank], live[rank], weights[rank], first, inbox)
            for rank in range(len(free))
        ]
        return _State(
            bound=bound,
            now=0,
            rank=0,
            code=-1,
            parent=None,
            free=tuple(free),
            live=tuple(live),
            weights=tuple(weights),
            left=tuple(left),
            options=tuple(options),
            done=tuple(first),
            inbox=tuple(inbox),
        )

    def _options(
        self,
        rank: int,
        free: int,
        live: int,
        weights: Sequence[int],
        done: Sequence[int],
        inbox: Sequence[Sequence[int]],
    ) -> tuple[tuple[int, int], ...]:
        """Return the actions that ``rank`` could do next with the inputs that have been sent to it."""
        problem = self.problem
        room = problem.limits[rank] - live
        found = [
            (max(free, inbox[station][0]), station)
            for station in problem.stations_by_rank[rank]
            if inbox[station] and problem.taken[station] <= room
        ]
        for code in weights:
            if done[code] < self.last[code]:
                found.append((free, code))
                break
        return tuple(found)

    def search(self, width: int, goal: int, random: Random) -> Orders | None:
        """Return orders with a makespan below ``goal``, or None if the search finds none.

        It follows ``width`` partial orders at a time; ``random`` breaks ties.
        """
        layer = [self.start]
        greed = random.choice(_GREEDS)
        for _ in range(self.size):
            self.visited += len(layer)
            steps = [step for state in layer for step in self._steps(state, goal, greed, random)]
            steps.sort(key=itemgetter(0, 1))
            layer = []
            reached: dict[tuple[int, ...], list[list[int]]] = {}
            for _, _, bound, start, rank, code, state in steps:
                new = self._after(state, bound, start, rank, code)
                times = [time if time > start else start for time in new.free]
                for arrivals in new.inbox:
                    times += arrivals
                rivals = reached.setdefault(new.done, [])
                if not any(all(map(le, rival, times)) for rival in rivals):
                    rivals.append(times)
                    layer.append(new)
                    if len(layer) == width:
                        break
        return self._orders(min(layer, key=itemgetter(0))) if layer else None

    def _steps(
        self, state: _State, goal: int, greed: int, random: Random
    ) -> Iterator[tuple[int, int, int, int, int, int, _State]]:
        """Yield (score, random number, bound, start, rank, code, ``state``) for every possible next action.

        The next action starts no earlier than the last one, so that each order is visited once.
        """
        duration, stages = self.problem.duration, self.problem.placement.stages
        now, last = state.now, state.rank
        free, left, done, after = state.free, state.left, state.done, self.after
        bound, idle = state.bound, 0
        latest = latest_forward = NEVER
        possible = []
        for rank, options in enumerate(state.options):
            if not left[rank]:
                continue
            first = NEVER
            for start, code in options:
                if start > now or (start == now and rank >= last):
                    possible.append((start, rank, code))
                    if start < first:
                        first = start
                end = start + duration[code]
                if code < stages:
                    if end < latest_forward:
                        latest_forward = end
                elif end < latest:
                    latest = end
            if first == NEVER:
                first = max(now, free[rank])
            end = first + left[rank] + after[rank]
            idle += end
            if end > bound:
                bound = end
        if bound >= goal:
            return
        if latest == NEVER:
            latest = latest_forward
        for start, rank, code in possible:
            if start < latest:
                total = max(bound, start + self.least[code][done[code]], start + left[rank] + after[rank])
                if total < goal:
                    score = idle + start - free[rank] + greed * total
                    yield score, random.getrandbits(16), total, start, rank, code, state

    def _after(self, state: _State, bound: int, start: int, rank: int, code: int) -> _State:
        """Return ``state`` with one action more."""
        problem = self.problem
        end = start + problem.duration[code]
        free = with_value(state.free, rank, end)
        live = with_value(state.live, rank, state.live[rank] + problem.taken[code] - problem.freed[code])
        left = with_value(state.left, rank, state.left[rank] - problem.duration[code])
        done = with_value(state.done, code, state.done[code] + 1)
        weights, inbox = state.weights, state.inbox
        changed = [rank]
        if code >= problem.stations:
            at = weights[rank].index(code)
            weights = with_value(weights, rank, weights[rank][:at] + weights[rank][at + 1 :])
        else:
            inbox = with_value(inbox, code, inbox[code][1:])
            if code >= problem.placement.stages:
                weights = with_value(weights, rank, (*weights[rank], problem.weight_of(code)))
            after = code + 1
            if after < problem.stations and done[code] <= self.last[after]:
                inbox = with_value(inbox, after, (*inbox[after], end + problem.delay[code]))
                if problem.home[after] != rank:
                    changed.append(problem.home[after])
        options = state.options
        for where in changed:
            found = self._options(where, free[where], live[where], weights[where], done, inbox)
            options = with_value(options, where, found)
        return _State(bound, start, rank, code, state, free, live, weights, left, options, done, inbox)

    def _orders(self, state: _State) -> Orders:
        """Return the complete orders for ``state``, in which the window is full."""
        inside: Orders = [[] for _ in self.orders]
        while state.parent is not None:
            inside[state.rank].append(state.code)
            state = state.parent
        return [
            order[:start] + filled[::-1] + order[stop:]
            for order, filled, (start, stop) in zip(self.orders, inside, self.cuts, strict=True)
        ]
