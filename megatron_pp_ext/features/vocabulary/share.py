"""A vocabulary that all ranks share (arXiv 2411.05288, sections 4 and 5, algorithm 2).

The output layer and its loss make the last stage as slow as many layers.  Here every rank holds an equal part
of the output layer, and does a part of its work for each microbatch:

* The last stage hands its output, the hidden state, to all ranks.
* **S**: each rank multiplies it by its rows of the output weight.  It keeps the largest of its logits and the
  sum of their exponentials, for each token, and makes its part of the hidden state's gradient from them.
* The ranks exchange these.  The last stage has the loss now, and the gradient of its output, without another
  product: its backward can begin.
* **T**: each rank makes the gradient of its rows of the weight, at any later time, as with a W.

Between a microbatch's last forward and its first backward there are now an S of every rank and two exchanges.
``share`` gives them time with the order of any schedule: backwards are put off, so that each rank keeps up to
one microbatch more, and S and T stand where the ranks come by.

1. There are two ways to put backwards off.  By a microbatch: the schedule is built for one more, and its last
   forwards and its first backwards are dropped.  The backward of microbatch i then stands where that of i + 1
   was, a period later, and the pattern of the steady state stays as it is.  Or by forwards: each rank does a
   few of its forwards, no more than it has chunks, earlier by that number of backwards.
2. The ranks are run on paper.  A rank does S as soon as the hidden state is there, unless it keeps the logits
   of four microbatches, its own order otherwise, and T when it would wait, or when two of them are due.
3. Of the orders that come out, all but a little the shortest is taken that keeps least.

A frozen output layer has no T: ``without_weight_gradients``.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule, delivers
from megatron_pp_ext.schedule.check import InvalidSchedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.launch_order import HIDDEN, P2P, SUMS, WORK
from megatron_pp_ext.schedule.placement import Placement

_DUE = 2
"""The weight gradients that a rank may put off before it does one though it need not wait."""

_MOST = 4
"""The microbatches whose logits a rank keeps at most, from S to T."""

_NEARLY = 1.01
"""How much longer than the shortest order one may be that keeps less."""

type Order = tuple[Action, ...]


def share(build: Callable[[int], Schedule], microbatches: int) -> Schedule:
    """Return the schedule that ``build(microbatches)`` returns, with a vocabulary that all ranks share.

    ``build`` takes any number of microbatches and returns a schedule that flushes.  Every rank keeps up to
    one microbatch more than without.  Raises InvalidSchedule where the ranks wait for each other.
    """
    schedule = build(microbatches)
    placement = replace(schedule.placement, splits_head=True)
    candidates = [
        run for orders in _put_off(schedule, build) if (run := _run(orders, placement, microbatches))
    ]
    if not candidates:
        raise InvalidSchedule("the ranks wait for each other: let schedule.check name the actions")
    shortest = min(run.end for run in candidates)
    schedule_run = min(
        (run for run in candidates if run.end <= _NEARLY * shortest), key=lambda run: run.most_kept
    )
    return replace(schedule, placement=placement, orders=schedule_run.orders)


def share_evaluation(schedule: Schedule) -> Schedule:
    """Return ``schedule``, of forwards alone, with S for every microbatch."""
    placement = replace(schedule.placement, splits_head=True)
    run = _run(schedule.orders, placement, schedule.microbatches)
    if run is None:
        raise InvalidSchedule("the ranks wait for each other: let schedule.check name the actions")
    return replace(schedule, placement=placement, orders=run.orders)


def without_weight_gradients(schedule: Schedule) -> Schedule:
    """Return ``schedule`` for an output layer whose weight is frozen: without T, for which nothing waits.

    A copy that was launched before a T, or freed its memory there, does so before the action after it.
    """
    orders = (tuple(action for action in order if action.kind is not Kind.T) for order in schedule.orders)
    following: dict[Action, Action] = {}
    for order in schedule.orders:
        successor = order[-1]
        for action in reversed(order):
            successor = successor if action.kind is Kind.T else action
            following[action] = successor
    return replace(schedule, orders=tuple(orders), copies=schedule.copies.with_actions(following.__getitem__))


def _put_off(schedule: Schedule, build: Callable[[int], Schedule]) -> Iterator[list[Order]]:
    """Yield the orders of ``schedule`` with backwards put off in every way; see the module's docstring."""
    for forwards in range(schedule.placement.chunks + 1):
        yield [tuple(_by_forwards(order, forwards)) for order in schedule.orders]
    longer = build(schedule.microbatches + 1)
    if _is_in_order(longer):
        yield [tuple(_by_a_microbatch(order, schedule.microbatches)) for order in longer.orders]


def _is_in_order(schedule: Schedule) -> bool:
    """Whether every stage takes its microbatches one after the other, forward and backward."""
    following: dict[tuple[int, Kind], int] = defaultdict(int)
    for action in map(delivers, schedule):
        place = action.stage, action.kind
        if action.kind is not Kind.W and following[place] != action.microbatch:
            return False
        following[place] += 1
    return True


def _by_a_microbatch(order: Order, microbatches: int) -> Iterator[Action]:
    for action in order:
        microbatch = action.microbatch - (action.kind is not Kind.F)
        if 0 <= microbatch < microbatches:
            yield action._replace(microbatch=microbatch)


def _by_forwards(order: Order, count: int) -> Iterator[Action]:
    forwards = iter([action for action in order if action.kind is Kind.F])
    lead = count
    for action in order:
        if action.kind is Kind.F:
            lead += 1
        else:
            yield from islice(forwards, lead)
            lead = 0
            yield action
    yield from forwards


def _run(orders: Sequence[Order], placement: Placement, microbatches: int) -> "_Paper | None":
    """Run the ranks on paper, each in its order; None if they end up waiting for each other."""
    run = _Paper(orders, placement)
    while run.moments:
        run.go_on(*heapq.heappop(run.moments))
    actions = sum(map(len, orders)) + placement.ranks * microbatches * (1 + run.has_backwards)
    return run if sum(map(len, run.done)) == actions else None


class _Paper:
    """The ranks at work; ``moments`` are the times, each with a rank, at which one may go on.

    An action names who waits for it.  The needs of a ``Program``, turned round, would take twice as long.
    """

    def __init__(self, orders: Sequence[Order], placement: Placement) -> None:
        self.moments = [(0, rank) for rank in range(len(orders))]
        self.done: list[list[Action]] = [[] for _ in orders]
        self.has_backwards = any(action.kind is not Kind.F for order in orders for action in order)
        self._orders, self._placement = orders, placement
        self._home = [placement.rank_of(stage) for stage in range(placement.stages)]
        self._at = [0] * len(orders)
        self._now = [0] * len(orders)
        self._kept = [0] * len(orders)
        # From when on an action has what comes from elsewhere.  What it needs of its own stage is done before
        # it, as in any order that is valid.
        self._since: dict[Action, int] = {}
        self._with_logits: Counter[int] = Counter()
        # The S and the T that each rank still has to do, oldest first, and since when it can.
        self._logits: list[deque[tuple[int, Action]]] = [deque() for _ in orders]
        self._gradients: list[deque[tuple[int, Action]]] = [deque() for _ in orders]

    @property
    def orders(self) -> tuple[Order, ...]:
        return tuple(map(tuple, self.done))

    @property
    def end(self) -> int:
        return max(self._now)

    @property
    def most_kept(self) -> float:
        """The most stages' activations that a rank has kept at one time."""
        growth = Costs.unit(self._placement).kept
        return max(max(accumulate(map(growth, order))) for order in self.done)

    def go_on(self, moment: int, rank: int) -> None:
        """Let ``rank`` run its first possible action at ``moment``, if it is free."""
        if moment < self._now[rank]:
            return  # It is busy, and its end is another moment.
        action = self._choice(moment, rank)
        if action is not None:
            self.done[rank].append(action)
            self._now[rank] = end = moment + WORK[action.kind]
            heapq.heappush(self.moments, (end, rank))
            self._release(action, rank, end)

    def _choice(self, moment: int, rank: int) -> Action | None:
        logits, gradients, order = self._logits[rank], self._gradients[rank], self._orders[rank]
        is_full = self._kept[rank] == _MOST
        if logits and logits[0][0] <= moment and not is_full:
            self._kept[rank] += self.has_backwards
            return logits.popleft()[1]
        due = 1 if is_full else _DUE
        if len(gradients) >= due and gradients[due - 1][0] <= moment:
            return self._oldest_gradient(rank)
        if self._at[rank] < len(order):
            action = order[self._at[rank]]
            if self._is_ready(action, moment):
                self._at[rank] += 1
                return action
        return self._oldest_gradient(rank) if gradients and gradients[0][0] <= moment else None

    def _oldest_gradient(self, rank: int) -> Action:
        self._kept[rank] -= 1
        return self._gradients[rank].popleft()[1]

    def _is_ready(self, action: Action, moment: int) -> bool:
        if action.kind is Kind.W or (action.kind is Kind.F and action.stage == 0):
            return True
        since = self._since.get(delivers(action))
        return since is not None and since <= moment

    def _release(self, action: Action, rank: int, end: int) -> None:
        """Note whom ``action``, which ``rank`` ends at ``end``, lets go on."""
        stage, kind, microbatch = action
        last = len(self._home) - 1
        if kind is Kind.S:
            self._with_logits[microbatch] += 1
            if self._with_logits[microbatch] == len(self._orders):
                self._lets(Action(last, Kind.I, microbatch), end + SUMS)
        elif kind is Kind.F and stage < last:
            self._lets(Action(stage + 1, Kind.F, microbatch), end, rank)
        elif kind in (Kind.I, Kind.B) and stage > 0:
            self._lets(Action(stage - 1, Kind.I, microbatch), end, rank)
        if stage == last and kind in (Kind.F, Kind.I, Kind.B):
            part, queues = (Kind.S, self._logits) if kind is Kind.F else (Kind.T, self._gradients)
            for other, queue in enumerate(queues):
                since = end + (HIDDEN if other != rank else 0)
                queue.append((since, Action(other, part, microbatch)))
                heapq.heappush(self.moments, (since, other))

    def _lets(self, action: Action, since: int, sender: int | None = None) -> None:
        """Note that ``action`` can start at ``since``, a message later if ``sender`` is another rank."""
        rank = self._home[action.stage]
        since += P2P if sender not in (None, rank) else 0
        self._since[action] = since
        heapq.heappush(self.moments, (since, rank))
