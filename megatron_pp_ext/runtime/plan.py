"""One rank's part of a schedule, with its messages.

Every rank derives the same messages from the same schedule, so sender and receiver agree on the order of
the messages, and on the place of each receive (``schedule.messages``), without communicating.
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
    """One action of this rank, the message that it takes (``source``) and the one it makes (``target``).

    Both are None at the ends of the model and for W, which exchanges nothing.  ``source_rank`` and
    ``target_rank`` may be this rank itself, as at the turn of a V.  ``receives`` are posted right before
    the action, in this order; their messages are for this action and for later ones.
    """

    action: Action
    receives: tuple[Arrival, ...] = ()
    source: Message | None = None
    source_rank: int = -1
    target: Message | None = None
    target_rank: int = -1


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Everything that one rank does in a training step, computed once.

    ``left_open`` are receives that are posted after the last action, for a later step; only a pipeline
    that does not flush has any.
    """

    rank: int
    steps: tuple[Step, ...]
    left_open: tuple[Arrival, ...]


def plan_rank(schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of ``rank`` in ``schedule``."""
    placement = schedule.placement
    return plan_orders(schedule.orders, placement.stages, lambda stage, _: placement.rank_of(stage), rank)


def plan_orders(orders: Orders, stages: int, rank_of: RankOf, rank: int) -> RankPlan:
    """Return the plan of ``rank`` where all ranks follow ``orders`` with a model of ``stages`` stages."""
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
