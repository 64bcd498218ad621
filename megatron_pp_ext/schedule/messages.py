"""The messages of a schedule, and the one line in which all ranks of a pipeline launch them.

A schedule is the order of computations; the messages follow from it.  The output of a stage's forward goes
to the next stage, and the gradient of its input to the stage before.  It goes over the wire when that stage
is on another rank, and is passed on within the rank at the turn of a V.

A GPU runs what its host launched in an order of its own: kernels pass through a few hardware queues, a
message may have to wait for its other end, and the host itself stops wherever something synchronizes the
device.  A rank may therefore wait at any moment for anything that it has launched already.  Such a
pipeline cannot hang if all launches stand in one line that every rank keeps to:

* ``launch_line`` puts the actions of all ranks in one line.  Every action stands behind those before it
  on its rank and behind the one whose output it takes.
* A rank sends a message right behind the action that made it, and posts the receive of a message where
  the *sender's* action stands in the line.

To see this, take the first launch in the line that is not done.  Everything that it waits for on its own
rank was launched before it, so it stands before it in the line and is done.  If the launch is one end of a
message, the other end has the same place in the line, and the same holds on that rank.  A host that waits
does so for launches that stand before its next one.  So the first launch can always proceed: no circle
exists, whatever queues, buffers and synchronizations the hardware has.  A collective within an action, of
tensor, context, expert or data parallelism, has the place of its action on all its ranks, which run the
same schedule.

The proof holds for any such line, good or bad.  The line here is that of the ends of all actions in a
simulation of the schedule, so that a receive is posted in the action before its message arrives.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megatron_pp_ext.schedule.actions import Action, Kind, delivers
from megatron_pp_ext.schedule.check import InvalidSchedule, walk

SENDS_AHEAD = 4
"""The number of sent messages that may be under way before a rank waits for the first of them.

In the simulation a message is taken as soon as it arrives.  A few messages under way give some slack to
ranks that are slower than simulated; all of them take memory.
"""

_WORK = {Kind.F: 20, Kind.I: 22, Kind.W: 14, Kind.B: 36}
_HOP = 1
"""The simulated times of actions and messages, in the usual proportions of a transformer's layers.

They are whole numbers, so that the line is the same on every machine.
"""

type Orders = Sequence[Sequence[Action]]
"""One list of actions a rank."""

RankOf = Callable[[int, int], int]
"""The rank that runs a stage for a microbatch."""


class Message(NamedTuple):
    """A tensor that one stage hands to another for one microbatch.

    A forward message goes to stage ``sender + 1``, and a gradient to ``sender - 1``.
    """

    sender: int
    receiver: int
    microbatch: int


class Arrival(NamedTuple):
    """A message that comes from the pipeline rank ``peer``."""

    peer: int
    message: Message


def incoming_message(action: Action, stages: int) -> Message | None:
    """Return the message that ``action`` needs before it can start, in a model of ``stages`` stages."""
    stage, kind, microbatch = action
    if kind is Kind.F:
        return Message(stage - 1, stage, microbatch) if stage > 0 else None
    if kind is Kind.W or stage + 1 == stages:
        return None
    return Message(stage + 1, stage, microbatch)


def outgoing_message(action: Action, stages: int) -> Message | None:
    """Return the message that ``action`` makes for another stage, in a model of ``stages`` stages."""
    stage, kind, microbatch = action
    if kind is Kind.F:
        return Message(stage, stage + 1, microbatch) if stage + 1 < stages else None
    if kind is Kind.W or stage == 0:
        return None
    return Message(stage, stage - 1, microbatch)


def posted_receives(orders: Orders, stages: int, rank_of: RankOf) -> list[list[tuple[Arrival, ...]]]:
    """Return the receives that every rank posts: ``[r][i]`` are those of rank r right before its action i.

    Each list has one entry more than the rank has actions, for the receives behind the last one.  Their
    messages are in flight at the end of ``orders``, for later orders to take.  Raises what ``launch_line``
    raises.
    """
    posted: list[list[list[Arrival]]] = [[[] for _ in range(len(order) + 1)] for order in orders]
    launched = [0] * len(orders)
    for rank, action in launch_line(orders, stages, rank_of):
        launched[rank] += 1
        message = outgoing_message(action, stages)
        if message is None:
            continue
        receiver = rank_of(message.receiver, message.microbatch)
        if receiver != rank:
            posted[receiver][launched[receiver]].append(Arrival(rank, message))
    return [[tuple(arrivals) for arrivals in of_rank] for of_rank in posted]


def launch_line(orders: Orders, stages: int, rank_of: RankOf) -> Iterator[tuple[int, Action]]:
    """Return all actions of ``orders``, with their ranks, in the line that the module's docstring requires.

    Actions are sorted by their simulated ends, and by rank where these are equal.  Messages from actions
    that are not in ``orders`` were sent before these began.

    Raises InvalidSchedule where the ranks of ``orders`` wait for each other.
    """
    here = {delivers(action) for order in orders for action in order}

    def inputs(action: Action) -> tuple[Action, ...]:
        message = incoming_message(action, stages)
        if message is None:
            return ()
        kind = Kind.F if message.sender < message.receiver else Kind.I
        made_by = Action(message.sender, kind, message.microbatch)
        return (made_by,) if made_by in here else ()

    ends: dict[Action, int] = {}
    now = [0] * len(orders)
    line = []
    for rank, action, needed in walk(orders, inputs):
        for need in needed:
            hop = _HOP if rank_of(need.stage, need.microbatch) != rank else 0
            now[rank] = max(now[rank], ends[need] + hop)
        now[rank] += _WORK[action.kind]
        ends[delivers(action)] = now[rank]
        line.append((now[rank], rank, action))
    if len(line) < sum(map(len, orders)):
        raise InvalidSchedule("the ranks wait for each other: let schedule.check name the actions")
    return ((rank, action) for _, rank, action in sorted(line))


def most_buffers(orders: Orders, stages: int, rank_of: RankOf) -> list[int]:
    """Return the most message buffers that every rank holds at one time.

    ``orders`` must flush: every message in them is sent and taken.  Two kinds of buffers are counted.

    * Receives, from where they are posted until an action takes the message.  A forward makes it an
      activation of its stage as soon as it starts; a backward needs it until its end, before which nothing
      else is posted.
    * Sent messages that may be unfinished: ``SENDS_AHEAD`` whenever the rank continues, and for a moment the
      one that it has just sent.  When each of them is done is known on the machine alone, so that many are
      counted from beginning to end, but no more than the rank sends.

    This is an upper bound of what a rank's channels keep: receives are posted and taken in no other places,
    and sends can only be done earlier.  What a stage hands to another one of its rank is no message.

    Raises what ``launch_line`` raises.
    """
    posted = posted_receives(orders, stages, rank_of)
    arriving = [{arrival.message for arrivals in of_rank for arrival in arrivals} for of_rank in posted]
    sent = Counter(arrival.peer for of_rank in posted for arrivals in of_rank for arrival in arrivals)
    found = []
    for rank, order in enumerate(orders):
        waiting = most = 0
        for action, arrivals in zip(order, posted[rank], strict=False):
            waiting += len(arrivals)
            most = max(most, waiting)
            waiting -= incoming_message(action, stages) in arriving[rank]
        found.append(most + min(sent[rank], SENDS_AHEAD + 1))
    return found
