"""One rank's part of a schedule, with the messages spelled out.

A schedule says who computes what in which order; the messages follow from it.  The output of a
stage's forward goes to the next stage, the gradient of its input to the stage before, over the
wire when that stage lives on another rank and hand to hand at the turn of a V.  Every rank
derives the same messages from the same schedule, so sender and receiver agree on the order in
which messages travel without ever saying so: it is the order of the sender's actions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule


class Message(NamedTuple):
    """A tensor that one stage hands to another for one microbatch.

    A forward message goes to stage ``sender + 1``, a gradient to ``sender - 1``.
    """

    sender: int
    receiver: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Step:
    """One action of this rank, what it needs first and what it gives away.

    ``source`` and ``target`` are None at the ends of the model and for W, which exchanges
    nothing.  ``source_rank`` and ``target_rank`` may be this rank itself: the turn of a V.
    """

    action: Action
    source: Message | None = None
    source_rank: int = -1
    target: Message | None = None
    target_rank: int = -1


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Everything one rank does in a training step, worked out once.

    ``incoming[r]`` lists the messages that rank r will send here, in the order it sends them.
    """

    rank: int
    steps: tuple[Step, ...]
    incoming: dict[int, tuple[Message, ...]]


RankOf = Callable[[int, int], int]
"""The rank that runs a stage for a microbatch."""


def incoming_message(action: Action, stages: int) -> Message | None:
    """What ``action`` must be given before it can start."""
    stage, kind, microbatch = action
    if kind is Kind.F:
        return Message(stage - 1, stage, microbatch) if stage > 0 else None
    if kind is Kind.W or stage + 1 == stages:
        return None
    return Message(stage + 1, stage, microbatch)


def outgoing_message(action: Action, stages: int) -> Message | None:
    """What ``action`` leaves for another stage."""
    stage, kind, microbatch = action
    if kind is Kind.F:
        return Message(stage, stage + 1, microbatch) if stage + 1 < stages else None
    if kind is Kind.W or stage == 0:
        return None
    return Message(stage, stage - 1, microbatch)


def plan_rank(schedule: Schedule, rank: int) -> RankPlan:
    """Spell out ``rank``'s part of ``schedule``."""
    placement = schedule.placement
    return plan_orders(schedule.orders, placement.stages, lambda stage, _: placement.rank_of(stage), rank)


def plan_orders(orders: Sequence[Sequence[Action]], stages: int, rank_of: RankOf, rank: int) -> RankPlan:
    """Spell out ``rank``'s part of what all ranks do in ``orders`` with a model of ``stages`` stages."""
    return RankPlan(
        rank=rank,
        steps=tuple(_step(action, stages, rank_of) for action in orders[rank]),
        incoming={
            peer: messages
            for peer, order in enumerate(orders)
            if peer != rank and (messages := _sent_to(rank, order, stages, rank_of))
        },
    )


def _step(action: Action, stages: int, rank_of: RankOf) -> Step:
    source = incoming_message(action, stages)
    target = outgoing_message(action, stages)
    return Step(
        action,
        source=source,
        source_rank=rank_of(source.sender, source.microbatch) if source else -1,
        target=target,
        target_rank=rank_of(target.receiver, target.microbatch) if target else -1,
    )


def _sent_to(rank: int, order: Sequence[Action], stages: int, rank_of: RankOf) -> tuple[Message, ...]:
    messages = (outgoing_message(action, stages) for action in order)
    return tuple(m for m in messages if m is not None and rank_of(m.receiver, m.microbatch) == rank)
