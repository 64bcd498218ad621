"""Receives of messages that announce their shapes, posted as late as one order of launches allows.

The host of a rank that posts such a receive stops until the message has been sent.  The receive is posted
where the sender's action stands in the order of launches (``schedule.messages``).  So nothing is lost if the
sender's action comes after what the receiving rank does in the meantime:

* Where the times of units are planned, after the receiver's last action that starts before the sender's ends.
  The message is then on its way during later actions.
* Elsewhere lengths are not known, and no time can be relied on: after all that the receiver does before the
  action that takes the message.

Actions are taken in the order of their simulated ends, as soon as nothing is left that they are to come
after.  Under placements that come back to a rank, as those of interleaved schedules and of Vs, ranks may send
to each other at the same time, and would wait for each other in this.  The first of them then goes on, and
its receiver may have to stop for it.  The order remains one that every rank can keep to.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from megatron_pp_ext.schedule.columns import Column, as_list
from megatron_pp_ext.schedule.orders import Orders
from megatron_pp_ext.schedule.program import F
from megatron_pp_ext.schedule.walk import Walk


def late(walk: Walk, numbers: Column, starts: Column, ends: Column, orders: Orders) -> list[int]:
    """Return the ``numbers`` of all actions of ``orders`` anew, for inputs that announce their shapes.

    ``starts`` and ``ends`` are of the steps of ``walk``.
    """
    steps = range(1, len(walk.steps.before))
    actions = _actions_of(walk, numbers)
    place = dict.fromkeys(steps, 0) | {step: at for at, step in enumerate(actions, 1)}
    missing, followers = _needs(walk)
    waits = dict(_waits(walk, as_list(starts), as_list(ends), orders))
    waiting: dict[int, list[int]] = {}
    for sender, last in waits.items():
        waiting.setdefault(last, []).append(sender)

    finished, result = {0}, list[int]()
    able = [(place[step], step) for step in steps if not missing[step]]
    ready = [entry for entry in able if entry[1] not in waits]
    blocked = set(able) - set(ready)
    heapify(ready)
    while ready or blocked:
        if not ready:
            first = min(blocked)
            blocked.remove(first)
            ready.append(first)
        _, step = heappop(ready)
        finished.add(step)
        result += actions.get(step, ())
        for follower in followers[step]:
            missing[follower] -= 1
            if not missing[follower]:
                entry = place[follower], follower
                if follower in waits and waits[follower] not in finished:
                    blocked.add(entry)
                else:
                    heappush(ready, entry)
        for sender in waiting.get(step, ()):
            if (entry := (place[sender], sender)) in blocked:
                blocked.remove(entry)
                heappush(ready, entry)
    return result


def _actions_of(walk: Walk, numbers: Column) -> dict[int, list[int]]:
    """Return the numbers of the actions of each step, in the order of ``numbers``."""
    actions: dict[int, list[int]] = {}
    step_of = as_list(walk.step_of)
    for number in as_list(numbers):
        actions.setdefault(step_of[number], []).append(number)
    return actions


def _needs(walk: Walk) -> tuple[list[int], list[list[int]]]:
    """Return how many other steps each follows, and the followers of each."""
    before, sends = as_list(walk.steps.before), as_list(walk.steps.sends)
    missing, followers = [0] * len(before), [list[int]() for _ in before]
    for step in range(1, len(before)):
        for need in {before[step], sends[step]} - {0}:
            followers[need].append(step)
            missing[step] += 1
    return missing, followers


def _waits(walk: Walk, starts: list[float], ends: list[float], orders: Orders) -> Iterator[tuple[int, int]]:
    """Yield the step of each sender of an announced message, and that which it is to come after, if any."""
    columns, before, step_of = walk.program.columns, as_list(walk.steps.before), as_list(walk.step_of)
    stage, kind, microbatch, rank, _, bounds, *_ = map(as_list, columns)
    of_units = list(zip(stage, microbatch, strict=True))
    forwards = {unit: number for number, unit in enumerate(of_units) if kind[number] == F}
    is_timed, stages = bool(walk.program.durations), walk.program.placement.stages
    for (of_stage, unit), sender in forwards.items():
        target = of_stage + 1
        if target == stages or not orders.is_announced(target, unit):
            continue
        receiver = orders.rank_of(target, unit)
        if receiver == rank[sender]:
            continue
        taker = forwards.get((target, unit))
        # What later orders take is posted after all that the receiver does in these.
        last = step_of[bounds[receiver + 1] - 1] if taker is None else before[step_of[taker]]
        while last and starts[last] == ends[last]:  # an input of a pair is a step without work
            last = before[last]
        while is_timed and last and starts[last] >= ends[step_of[sender]]:
            last = before[last]
        if last:
            yield step_of[sender], last
