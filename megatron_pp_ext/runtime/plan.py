"""One rank's operations in a step, from the order of actions and from what all ranks launch beside them.

Every rank derives the same messages from the same schedule, so sender and receiver agree on the order of
the messages, and on the place of each receive (``schedule.messages``), without communicating.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_pp_ext.runtime.activation_meter import Owner
from megatron_pp_ext.runtime.operations import copy_work, transfers, vocabulary_work
from megatron_pp_ext.runtime.operations.compute import Compute
from megatron_pp_ext.runtime.operations.operation import Operation
from megatron_pp_ext.runtime.operations.pair import Pair
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule, together
from megatron_pp_ext.schedule.copies import Copies, Kept
from megatron_pp_ext.schedule.messages import (
    Arrival,
    Launch,
    Message,
    RankOf,
    incoming_message,
    outgoing_message,
    planned_launches,
)
from megatron_pp_ext.schedule.program import Orders

NO_COPIES = Copies()
"""All activations stay on the device."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Everything that one rank does in a training step, computed once; ``actions`` are its schedule's."""

    rank: int
    actions: tuple[Action, ...]
    operations: tuple[Operation, ...]

    @property
    def shares_vocabulary(self) -> bool:
        """Whether the rank needs its part of a vocabulary that all ranks share."""
        return any(action.kind is Kind.S for action in self.actions)

    @property
    def copies_activations(self) -> bool:
        """Whether any activations of this rank leave its device."""
        return any(isinstance(operation, copy_work.ToHost) for operation in self.operations)

    @property
    def has_pairs(self) -> bool:
        """Whether any two actions run together."""
        return any(isinstance(operation, Pair) for operation in self.operations)


def plan_rank(schedule: Schedule, rank: int, flushes: bool = True) -> RankPlan:
    """Return the plan of ``rank`` in ``schedule``; see ``plan_orders``."""
    placement, about = schedule.placement, (schedule.paired, flushes, schedule.copies)
    at = placement.rank_of
    return plan_orders(
        schedule.orders, placement.stages, lambda stage, _: at(stage), rank, *about, placement.ends_on_last
    )


def plan_orders(
    orders: Orders,
    stages: int,
    rank_of: RankOf,
    rank: int,
    paired: frozenset[Action] = frozenset(),
    flushes: bool = True,
    copies: Copies = NO_COPIES,
    ends_on_last: bool = False,
) -> RankPlan:
    """Return the plan of ``rank`` where all ranks follow ``orders`` with a model of ``stages`` stages.

    Unless it ``flushes``, messages may stay in flight, for a later step to take.  ``ends_on_last`` is that of
    the placement.
    """
    *launches, left_open = planned_launches(orders, stages, rank_of, paired, ends_on_last)[rank]
    order = tuple(orders[rank])
    shares_vocabulary = any(action.kind is Kind.S for action in order)
    planner = _Planner(rank, stages, rank_of, shares_vocabulary, frozenset(copies.back))
    steps = list(together(order, paired))
    given_up, brought_back = copies.given_up_before(steps), copies.launched_before(order)
    operations: list[Operation] = []
    place = 0
    for actions in steps:
        # Before the receives, which a copy back need not wait for.
        operations += [copy_work.GiveUp(Owner(*kept)) for kept in given_up.get(actions[0], ())]
        operations += [copy_work.ToDevice(Owner(*kept)) for kept in brought_back.get(actions[0], ())]
        operations += [planner.launch(one) for one in launches[place]]
        operations += planner.around(actions)
        place += len(actions)
    operations += [planner.launch(one) for one in left_open]
    operations += [copy_work.AllBack()] if brought_back else []
    operations += [vocabulary_work.Close()] if planner.shares_vocabulary else []
    operations += [transfers.Drain()] if flushes else []
    return RankPlan(rank, order, tuple(operations))


@dataclass(frozen=True, slots=True)
class _Planner:
    """Makes the operations of ``rank``.

    Where ranks share the vocabulary, it is the sender of the first stage's input, as a stage before it, and
    the receiver of the last stage's output, as a stage behind it.
    """

    rank: int
    stages: int
    rank_of: RankOf
    shares_vocabulary: bool
    away: frozenset[Kept]

    def launch(self, launch: Launch) -> Operation:
        """Return the operation for what the rank launches beside its actions."""
        return transfers.Post(*launch) if isinstance(launch, Arrival) else vocabulary_work.Begin(launch)

    def around(self, actions: tuple[Action, ...]) -> Iterator[Operation]:
        """Yield the operations of an action, or of a pair: their inputs, their work and their outputs."""
        works = [self._work(action) for action in actions]
        stage_works = [work for work in works if isinstance(work, Compute)]
        yield from self._inputs(stage_works)
        if len(works) > 1:
            yield Pair(*stage_works)
        else:
            yield from works
        yield from self._outputs(stage_works)
        for work in stage_works:
            if work.leaves:
                yield copy_work.ToHost(Owner(work.action.stage, work.action.microbatch))

    def _work(self, action: Action) -> Operation:
        stage, kind, microbatch = action
        if kind is Kind.S:
            return vocabulary_work.Logits(action)
        if kind is Kind.T:
            return vocabulary_work.WeightGradient(action)
        source, target = incoming_message(action, self.stages), outgoing_message(action, self.stages)
        is_forward = kind is Kind.F
        leaves = is_forward and (stage, microbatch) in self.away
        if not self.shares_vocabulary or kind is Kind.W:
            return Compute(action, source, target, leaves)
        if stage == 0 and is_forward:
            source = Message(-1, 0, microbatch)
        elif stage == 0:
            target = Message(0, -1, microbatch)
        if stage < self.stages - 1:
            return Compute(action, source, target, leaves)
        if is_forward:
            return Compute(action, source, Message(stage, self.stages, microbatch), leaves)
        return vocabulary_work.LossBackward(action, Message(self.stages, stage, microbatch), target)

    def _inputs(self, works: Iterable[Compute]) -> Iterator[Operation]:
        for source in filter(None, (work.source for work in works)):
            if source.sender < 0:
                yield vocabulary_work.TakeEmbedded(source)
            elif source.sender < self.stages:
                sender = self.rank_of(source.sender, source.microbatch)
                if sender != self.rank:
                    yield transfers.Receive(sender, source)

    def _outputs(self, works: Iterable[Compute]) -> Iterator[Operation]:
        for target in filter(None, (work.target for work in works)):
            if target.receiver < 0:
                yield vocabulary_work.KeepInputGradient(target)
            elif target.receiver == self.stages:
                yield vocabulary_work.KeepOutput(target)
            else:
                receiver = self.rank_of(target.receiver, target.microbatch)
                if receiver != self.rank:
                    yield transfers.Send(receiver, target)
