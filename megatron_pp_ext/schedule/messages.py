"""The messages of a schedule, and the one order in which all ranks of a pipeline launch them.

A schedule is the order of computations; the messages follow from it.  The output of a stage's forward goes
to the next stage, and the gradient of its input to the stage before.  It goes over the wire when that stage
is on another rank, and is passed on within the rank at the turn of a V.

A GPU runs what its host launched in an order of its own: kernels pass through a few hardware queues, a
message may have to wait for its other end, and the host itself stops wherever something synchronizes the
device.  A rank may therefore wait at any moment for anything that it has launched already.  Such a
pipeline cannot hang if all launches stand in one order that every rank keeps to:

* ``launch_order`` puts the actions of all ranks in one order.  Every action stands after those
  before it on its rank and after the one whose output it takes.
* A rank sends a message right after the action that made it, and posts the receive of a message where
  the *sender's* action stands in that order.
* What all ranks exchange about a split head has one place in the order, where every rank launches it.
* The two actions of a pair have one place in the order, after everything that either of them needs.  The
  rank sends the messages of both after the pair.
* A copy of activations to the host is launched right after their forward, and one back right before another
  action.  A rank waits for its own copies alone, and a copy for what its rank has launched before.

To see this, take the first launch of the order that is not done.  Everything that it waits for on its own
rank was launched before it, so it stands before it in the order and is done.  If the launch is one end of a
message or an exchange, the other ends have the same place in the order, and the same holds there.  A host
that waits does so for launches that stand before its next one.  So the first launch can always proceed: no
circle exists, whatever queues, buffers and synchronizations the hardware has.  A collective within an action,
of tensor, context, expert or data parallelism, has the place of its action on all its ranks, which run the
same schedule.

The proof holds for any such order, good or bad.  This one is that of the ends of all actions in a
simulation of the schedule, so that a receive is posted in the action before its message arrives.  Where a
receive is posted much later, its sender waits: few messages may be under way.  So where units take unlike
times the simulation has them (``Schedule.durations``).  Where a message announces its shape, the host of its
receiver stops in the receive, and the sender comes later in the order (``launch_order.late``).
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from megatron_pp_ext.schedule.actions import Action, Kind, Orders
from megatron_pp_ext.schedule.launch_order import P2P, launch_order

SENDS_AHEAD = 4
"""The number of sent messages that may be under way before a rank waits for the first of them.

In the simulation a message is taken as soon as it arrives.  A few messages under way give some slack to
ranks that are slower than simulated; all of them take memory.
"""

EMBEDS_AHEAD = 2
"""The forwards of the first stage for which an embedding in parts is looked up before they are due.

With one, the lookup would begin when the forward before ends, and the first stage would wait for it.
"""


class Message(NamedTuple):
    """A tensor that one stage hands to another for one microbatch.

    A forward message goes to stage ``sender + 1``, and a gradient to ``sender - 1``.
    """

    sender: int
    receiver: int
    microbatch: int


class Exchanged(StrEnum):
    """The exchanges of all ranks about a microbatch where they split the head, in this order."""

    TOKENS = "tokens"
    """The microbatch's tokens, from the first stage to all; one forward of that stage before EMBEDDED."""
    EMBEDDED = "embedded tokens"
    """The sum of all ranks' embeddings, to the first stage; ``EMBEDS_AHEAD`` of its forwards ahead."""
    HIDDEN = "hidden state"
    """The last stage's output, to all; launched after its forward."""
    STATISTICS = "statistics"
    """Each rank's largest logits and sums of exponentials, to all; after the last S."""
    GRADIENT = "gradient"
    """The sum of all parts of the hidden state's gradient, to the last stage; later by P2P, if it trains."""
    LOSS = "loss"
    """The gradient of the loss of every token, to all; after the last stage's backward."""
    INPUT = "gradient of embedded tokens"
    """The gradient of the embeddings, to all; after the first stage's backward."""


class Exchange(NamedTuple):
    """One exchange of all ranks about a microbatch."""

    what: Exchanged
    microbatch: int


class Arrival(NamedTuple):
    """A message that comes from the pipeline rank ``peer``."""

    peer: int
    message: Message


type Launch = Arrival | Exchange
"""A launch of a rank in addition to its actions and their sends."""


_ONWARDS = {Kind.F: 1, Kind.I: -1, Kind.B: -1}
"""Where the output of an action goes: to the next stage or to the one before."""


def incoming_message(action: Action, stages: int) -> Message | None:
    """Return the message that ``action`` needs before it can start, in a model of ``stages`` stages."""
    stage, kind, microbatch = action
    sender = stage - _ONWARDS.get(kind, 0)
    return Message(sender, stage, microbatch) if sender != stage and 0 <= sender < stages else None


def outgoing_message(action: Action, stages: int) -> Message | None:
    """Return the message that ``action`` makes for another stage, in a model of ``stages`` stages."""
    stage, kind, microbatch = action
    receiver = stage + _ONWARDS.get(kind, 0)
    return Message(stage, receiver, microbatch) if receiver != stage and 0 <= receiver < stages else None


def planned_launches(orders: Orders) -> list[list[tuple[Launch, ...]]]:
    """Return the launches of every rank in addition to its actions and their sends: receives and exchanges.

    ``[r][i]`` is what rank r launches right before its action i, in this order.  Each list has one entry more
    than the rank has actions, for launches after the last one.  Messages received there are in flight at the
    end of ``orders``, for later orders to take.  Nothing is launched between the two actions of a pair.
    Receives of messages that announce their shapes are posted late.

    Raises what ``launch_order`` raises.
    """
    stages, ranks = orders.stages, len(orders.by_rank)
    planned: list[list[list[Launch]]] = [[[] for _ in range(len(order) + 1)] for order in orders.by_rank]
    launched = [0] * ranks
    kinds = {action.kind for order in orders.by_rank for action in order}
    shares, is_evaluation = Kind.S in kinds, kinds <= {Kind.F, Kind.S}
    scored: Counter[int] = Counter()
    due: deque[tuple[int, Exchange]] = deque()

    def exchange(kind: Exchanged, microbatch: int) -> None:
        for of_rank, at in zip(planned, launched, strict=True):
            of_rank[at].append(Exchange(kind, microbatch))

    line = launch_order(orders)
    lookups = _lookups([action.microbatch for _, _, action in line if action[:2] == (0, Kind.F)])
    for ahead in next(lookups) if shares else ():
        exchange(*ahead)
    for end, rank, action in line:
        while due and due[0][0] < end:
            exchange(*due.popleft()[1])
        launched[rank] += 1
        message = outgoing_message(action, stages)
        if message is not None:
            receiver = orders.rank_of(message.receiver, message.microbatch)
            if receiver != rank:
                planned[receiver][launched[receiver]].append(Arrival(rank, message))
        stage, kind, microbatch = action
        if shares and stage == stages - 1 and kind in (Kind.F, Kind.I, Kind.B):
            exchange(Exchanged.HIDDEN if kind is Kind.F else Exchanged.LOSS, microbatch)
        if shares and stage == 0 and kind is Kind.F:
            for ahead in next(lookups):
                exchange(*ahead)
        elif shares and stage == 0 and kind in (Kind.I, Kind.B):
            exchange(Exchanged.INPUT, microbatch)
        if kind is Kind.S:
            scored[microbatch] += 1
            if scored[microbatch] == ranks:
                exchange(Exchanged.STATISTICS, microbatch)
                if not is_evaluation:
                    due.append((end + P2P, Exchange(Exchanged.GRADIENT, microbatch)))
    for _, remaining in due:
        exchange(*remaining)
    return [[tuple(launches) for launches in of_rank] for of_rank in planned]


def _lookups(microbatches: Sequence[int]) -> Iterator[list[Exchange]]:
    """Yield the exchanges of a shared embedding: at the beginning, then after each forward.

    ``microbatches`` are of the first stage's forwards, in their order.
    """
    tokens = [Exchange(Exchanged.TOKENS, microbatch) for microbatch in microbatches]
    embedded = [Exchange(Exchanged.EMBEDDED, microbatch) for microbatch in microbatches]
    yield tokens[: EMBEDS_AHEAD + 1] + embedded[:EMBEDS_AHEAD]
    for ahead in range(EMBEDS_AHEAD, len(microbatches) + EMBEDS_AHEAD):
        yield tokens[ahead + 1 : ahead + 2] + embedded[ahead : ahead + 1]
