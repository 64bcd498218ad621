"""One rank's part of a schedule, with its messages.

Every rank derives the same messages from the same schedule, so sender and receiver agree on the order of
the messages, and on the place of each receive (``schedule.messages``), without communicating.
"""

from dataclasses import dataclass

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.messages import (
    Launch,
    Message,
    RankOf,
    incoming_message,
    outgoing_message,
    planned_launches,
)
from megatron_pp_ext.schedule.program import Orders


@dataclass(frozen=True, slots=True)
class Step:
    """One action of this rank, the message that it takes (``source``) and the one it makes (``target``).

    Both are None at the ends of the model and for W, S and T, which send no message.  ``source_rank`` and
    ``target_rank`` may be this rank itself, as at the turn of a V.  ``launches`` come right before the
    action, in this order: receives of messages for this action and for later ones, and exchanges.
    ``is_paired`` is set where the action runs together with the next step's, which then has no launches.
    """

    action: Action
    launches: tuple[Launch, ...] = ()
    source: Message | None = None
    source_rank: int = -1
    target: Message | None = None
    target_rank: int = -1
    is_paired: bool = False


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Everything that one rank does in a training step, computed once.

    ``left_open`` comes after the last action: receives for a later step, which only a pipeline that does not
    flush has, and exchanges of an evaluation.  ``loss_stage`` is the stage whose output goes to a vocabulary
    that all ranks share, None where they share none.
    """

    rank: int
    steps: tuple[Step, ...]
    left_open: tuple[Launch, ...]
    loss_stage: int | None = None


def plan_rank(schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of ``rank`` in ``schedule``."""
    placement = schedule.placement
    return plan_orders(
        schedule.orders, placement.stages, lambda stage, _: placement.rank_of(stage), rank, schedule.paired
    )


def plan_orders(
    orders: Orders, stages: int, rank_of: RankOf, rank: int, paired: frozenset[Action] = frozenset()
) -> RankPlan:
    """Return the plan of ``rank`` where all ranks follow ``orders`` with a model of ``stages`` stages."""
    *launches, left_open = planned_launches(orders, stages, rank_of, paired)[rank]
    is_shared = any(action.kind is Kind.S for action in orders[rank])
    return RankPlan(
        rank=rank,
        steps=tuple(
            _step(action, before, stages, rank_of, action in paired)
            for action, before in zip(orders[rank], launches, strict=True)
        ),
        left_open=left_open,
        loss_stage=stages - 1 if is_shared else None,
    )


def _step(
    action: Action, launches: tuple[Launch, ...], stages: int, rank_of: RankOf, is_paired: bool
) -> Step:
    source = incoming_message(action, stages)
    target = outgoing_message(action, stages)
    return Step(
        action,
        launches,
        source=source,
        source_rank=rank_of(source.sender, source.microbatch) if source else -1,
        target=target,
        target_rank=rank_of(target.receiver, target.microbatch) if target else -1,
        is_paired=is_paired,
    )
