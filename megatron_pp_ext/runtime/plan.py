"""One rank's part of a schedule, with the messages spelled out.

Every rank derives the same messages from the same schedule, so sender and receiver agree on the order in
which messages travel without ever saying so, and on the place of each receive (``schedule.messages``).
"""

from dataclasses import dataclass

from megatron_pp_ext.schedule.actions import Action, Schedule
from megatron_pp_ext.schedule.messages import (
    Arrival,
    Message,
    Orders,
    RankOf,
    incoming_message,
    outgoing_message,
    posted_receives,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One action of this rank, what it needs first and what it gives away.

    ``source`` and ``target`` are None at the ends of the model and for W, which exchanges
    nothing.  ``source_rank`` and ``target_rank`` may be this rank itself: the turn of a V.
    ``receives`` are posted right before the action, in this order; they are of messages for this action
    and for later ones.
    """

    action: Action
    receives: tuple[Arrival, ...] = ()
    source: Message | None = None
    source_rank: int = -1
    target: Message | None = None
    target_rank: int = -1


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Everything one rank does in a training step, worked out once.

    ``left_open`` are receives that are posted behind the last action, for a later step: there are some
    only in a pipeline that does not flush.
    """

    rank: int
    steps: tuple[Step, ...]
    left_open: tuple[Arrival, ...]


def plan_rank(schedule: Schedule, rank: int) -> RankPlan:
    """Spell out ``rank``'s part of ``schedule``."""
    placement = schedule.placement
    return plan_orders(schedule.orders, placement.stages, lambda stage, _: placement.rank_of(stage), rank)


def plan_orders(orders: Orders, stages: int, rank_of: RankOf, rank: int) -> RankPlan:
    """Spell out ``rank``'s part of what all ranks do in ``orders`` with a model of ``stages`` stages."""
    *receives, left_open = posted_receives(orders, stages, rank_of)[rank]
    return RankPlan(
        rank=rank,
        steps=tuple(
            _step(action, arrivals, stages, rank_of)
            for action, arrivals in zip(orders[rank], receives, strict=True)
        ),
        left_open=left_open,
    )


def _step(action: Action, receives: tuple[Arrival, ...], stages: int, rank_of: RankOf) -> Step:
    source = incoming_message(action, stages)
    target = outgoing_message(action, stages)
    return Step(
        action,
        receives,
        source=source,
        source_rank=rank_of(source.sender, source.microbatch) if source else -1,
        target=target,
        target_rank=rank_of(target.receiver, target.microbatch) if target else -1,
    )
