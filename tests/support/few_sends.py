"""How long a step takes where few sent messages may be under way, by the operations that its ranks run."""

from collections import deque

from megatron_pp_ext.runtime.operations import Compute, Post, Receive, Send
from megatron_pp_ext.runtime.plan import RankPlan, plan_rank
from megatron_pp_ext.schedule.actions import Announced, Orders, Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.messages import SENDS_AHEAD, Message


def step_seconds(
    schedule: Schedule,
    costs: Costs,
    announced: Announced = Announced.NOTHING,
    is_late: bool = True,
    hop: float = 0.0,
) -> float:
    """Return the length of a step whose messages take ``hop`` from where their receive is posted.

    A rank that has sent more than ``SENDS_AHEAD`` messages whose receives are not posted waits for the first
    of them.  A rank that posts the receive of a message whose shape is ``announced`` waits for its sender.
    Unless ``is_late`` receives are posted as where shapes are known.
    """
    of_plan = announced if is_late else Announced.NOTHING
    plans = [plan_rank(schedule, rank, announced=of_plan) for rank in range(schedule.ranks)]
    return seconds_of(plans, schedule, costs, announced, hop)


def seconds_of(
    plans: list[RankPlan],
    schedule: Schedule,
    costs: Costs,
    announced: Announced = Announced.NOTHING,
    hop: float = 0.0,
) -> float:
    """Return ``step_seconds`` for the ``plans`` of all ranks."""
    operations = [plan.operations for plan in plans]
    at, now = [0] * len(plans), [0.0] * len(plans)
    posted, sent_at = dict[Message, float](), dict[Message, float]()
    under_way: list[deque[Message]] = [deque() for _ in plans]
    inputs = Orders.of(schedule, announced)

    def announces(message: Message) -> bool:
        is_activation = message.sender < message.receiver
        return is_activation and inputs.is_announced(message.receiver, message.microbatch)

    def runs(rank: int) -> bool:
        """Run the rank's next operation, if it can run."""
        operation, waiting = operations[rank][at[rank]], under_way[rank]
        match operation:
            case Post(_, message):
                is_announced = announces(message)
                if is_announced and message not in sent_at:
                    return False
                now[rank] = max(now[rank], sent_at[message] + hop if is_announced else 0.0)
                posted[message] = now[rank]
            case Receive(_, message):
                if message not in sent_at:
                    return False
                now[rank] = max(now[rank], max(sent_at[message], posted[message]) + hop)
            case Send(_, message):
                if message not in sent_at:
                    sent_at[message] = now[rank]
                    waiting.append(message)
                while len(waiting) > SENDS_AHEAD:
                    if waiting[0] not in posted:
                        return False
                    now[rank] = max(now[rank], posted[waiting.popleft()])
            case Compute():
                now[rank] += costs.seconds(operation.action)
        at[rank] += 1
        return True

    while any(place < len(plan) for place, plan in zip(at, operations, strict=True)):
        moved = False
        for rank, plan in enumerate(operations):
            while at[rank] < len(plan) and runs(rank):
                moved = True
        assert moved, "the ranks wait for each other"
    return max(now)
