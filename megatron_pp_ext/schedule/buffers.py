"""The most message buffers that every rank holds at one time."""

from megatron_pp_ext.schedule.columns import Column, as_list
from megatron_pp_ext.schedule.launch_order import in_line
from megatron_pp_ext.schedule.loops import Loop
from megatron_pp_ext.schedule.messages import SENDS_AHEAD
from megatron_pp_ext.schedule.program import P2P, Columns, T
from megatron_pp_ext.schedule.walk import Walk


def most_buffers(walk: Walk) -> tuple[int, ...]:
    """Return the most message buffers that every rank of ``walk`` holds at one time.

    Its orders must flush: every message in them is sent and taken.  Two kinds of buffers are counted.

    * Receives, from where they are posted until an action takes the message.  A forward makes it an
      activation of its stage as soon as it starts; a backward needs it until its end, before which nothing
      else is posted.
    * Sent messages that may be unfinished: ``SENDS_AHEAD`` whenever the rank continues, and for a moment the
      one that it has just sent.  When each of them is done is known on the machine alone, so that many are
      counted from beginning to end, but no more than the rank sends.

    This is an upper bound of the buffers of a rank's channels: receives are posted and taken in no other
    places, and sends can only be done earlier.  Between two stages of one rank there is no message.
    """
    program, (_, line) = walk.program, in_line(walk)
    count, ranks = program.count, program.ranks
    *counts, most = map(program.make.zeros, (count, count, count + ranks, ranks, ranks, ranks))
    _count_buffers(program.columns, line, SENDS_AHEAD + 1, *counts, most)
    return tuple(as_list(most))


@Loop
def _count_buffers(
    columns: Columns,
    line: Column,
    ahead: int,
    receiver: Column,
    takes: Column,
    posted: Column,
    launched: Column,
    sent: Column,
    most: Column,
) -> None:
    """Count the ``most`` buffers of every rank, with the actions launched in the order of ``line``.

    ``receiver`` is the rank that an action sends to, plus 1, and 0 where it sends nothing; ``takes`` is 1
    where it takes one.  Rank r posts receives in front of each of its actions, and after the last: at
    ``bounds[r] + r`` in ``posted`` and on.
    """
    _, kind, _, rank_of, _, bounds, begins, needed, wires = columns
    for action in range(len(kind)):
        for entry in range(begins[action], begins[action + 1]):
            is_remote = rank_of[needed[entry]] != rank_of[action]
            if is_remote and wires[entry] == P2P and kind[action] != T:
                receiver[needed[entry]] = rank_of[action] + 1
                takes[action] = 1
    for action in line:
        rank = rank_of[action]
        launched[rank] += 1
        if receiver[action]:
            other = receiver[action] - 1
            posted[bounds[other] + other + launched[other]] += 1
            sent[rank] += 1
    for rank in range(len(most)):
        waiting = 0
        for action in range(bounds[rank], bounds[rank + 1]):
            waiting += posted[action + rank]
            most[rank] = max(most[rank], waiting)
            waiting -= takes[action]
        most[rank] += min(sent[rank], ahead)
