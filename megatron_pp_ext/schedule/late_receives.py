"""Receives of messages that announce their shapes, posted as late as one order of launches allows.

The host of a rank that posts such a receive stops until the message has been sent.  The receive is posted
where the sender's action stands in the order of launches (``schedule.messages``).  So nothing is lost if
everything that the receiving rank begins in the meantime comes before the sender's action: its last action
that starts before the sender's ends, of those before the one that takes the message.

These are added to what actions wait for, and actions taken in the order of their simulated ends as soon as
nothing is left that they wait for.  Under placements that come back to a rank, as those of interleaved
schedules and of Vs, ranks may send to each other at the same time, and the additions form a circle.  Its
first action then drops its own: its receiver waits, and the order remains one that every rank can keep to.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from megatron_pp_ext.schedule.announcements import IsAnnounced
from megatron_pp_ext.schedule.columns import Column, as_list
from megatron_pp_ext.schedule.program import F
from megatron_pp_ext.schedule.walk import Walk


def late(walk: Walk, numbers: Column, starts: Column, ends: Column, is_announced: IsAnnounced) -> list[int]:
    """Return the ``numbers`` of all actions in another order, for inputs of which some are announced.

    ``starts`` and ``ends`` are those of the steps of ``walk``.
    """
    before, sends = as_list(walk.steps.before), as_list(walk.steps.sends)
    actions = _actions_of(walk, numbers)
    place = [0] * len(before)
    for at, step in enumerate(actions, 1):
        place[step] = at
    followers: list[list[int]] = [[] for _ in before]
    left, added = [0] * len(before), [0] * len(before)
    for step in range(1, len(before)):
        for needed in {before[step], sends[step]} - {0}:
            followers[needed].append(step)
            left[step] += 1
    later: list[list[int]] = [[] for _ in before]
    for sender, last in _waits(walk, as_list(starts), as_list(ends), is_announced):
        later[last].append(sender)
        added[sender] += 1

    found: list[int] = []
    ready = [(place[step], step) for step in range(1, len(before)) if not left[step] and not added[step]]
    held = {(place[step], step) for step in range(1, len(before)) if not left[step] and added[step]}
    heapify(ready)
    while ready or held:
        if not ready:
            first = min(held)
            held.remove(first)
            added[first[1]] = 0
            ready.append(first)
        _, step = heappop(ready)
        found += actions.get(step, ())
        for follower in followers[step]:
            left[follower] -= 1
            if not left[follower]:
                entry = place[follower], follower
                held.add(entry) if added[follower] else heappush(ready, entry)
        for sender in later[step]:
            if added[sender]:
                added[sender] -= 1
                if not added[sender] and not left[sender]:
                    held.remove((place[sender], sender))
                    heappush(ready, (place[sender], sender))
    return found


def _actions_of(walk: Walk, numbers: Column) -> dict[int, list[int]]:
    """Return the numbers of the actions of each step, in the order of ``numbers``."""
    found: dict[int, list[int]] = {}
    for number in as_list(numbers):
        found.setdefault(walk.step_of[number], []).append(number)
    return found


def _waits(
    walk: Walk, starts: list[float], ends: list[float], is_announced: IsAnnounced
) -> Iterator[tuple[int, int]]:
    """Yield the step of each sender of an announced message, and the step that it is to come after."""
    columns, before = walk.program.columns, as_list(walk.steps.before)
    stage, kind, microbatch, rank, _, _, begins, needed, _ = map(as_list, columns)
    for number, code in enumerate(kind):
        if code != F or begins[number] == begins[number + 1]:
            continue
        sender = needed[begins[number]]
        if sender == len(kind) or rank[sender] == rank[number]:
            continue
        if not is_announced(stage[number], microbatch[number]):
            continue
        end, last = ends[walk.step_of[sender]], before[walk.step_of[number]]
        while last and (starts[last] >= end or starts[last] == ends[last]):
            last = before[last]
        if last:
            yield walk.step_of[sender], last
