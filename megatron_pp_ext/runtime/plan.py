"""One rank's operations in a step, from the order of actions and the launches that go with them.

Every rank derives the same messages from the same schedule, so sender and receiver agree on the order of
the messages, and on the place of each receive (``schedule.messages``), without communicating.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.runtime.operations import (
    Compute,
    Drain,
    Extension,
    Operation,
    Post,
    RankOrder,
    Receive,
    Send,
)
from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Announced, Orders, Schedule, together
from megatron_pp_ext.schedule.messages import (
    Arrival,
    Launch,
    Message,
    incoming_message,
    outgoing_message,
    planned_launches,
)
from megatron_pp_ext.schedule.timing import lenders_of

NO_LENDERS: Mapping[Action, Action] = MappingProxyType({})
"""Every product of a W runs in that W."""


@dataclass(frozen=True, slots=True)
class StepOperations:
    """The operations of one step of a rank: ``first``, ``launches``, and the ``work``."""

    first: tuple[Operation, ...]
    launches: tuple[Operation, ...]
    work: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Everything that one rank does in a training step, computed once.

    ``actions`` are its schedule's, ``steps`` the same with those together that run together.  ``by_step`` has
    the operations of each step, and ``at_end`` those after the last one.
    """

    rank: int
    actions: tuple[Action, ...]
    steps: tuple[tuple[Action, ...], ...]
    by_step: tuple[StepOperations, ...] = field(repr=False)
    at_end: tuple[Operation, ...] = ()
    operations: tuple[Operation, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        operations: list[Operation] = []
        for step in self.by_step:
            operations += (*step.first, *step.launches, *step.work)
        object.__setattr__(self, "operations", (*operations, *self.at_end))

    def has(self, kind: type[Operation]) -> bool:
        """Return whether any operation is of this ``kind``."""
        return any(isinstance(operation, kind) for operation in self.operations)


def plan_rank(
    schedule: Schedule, rank: int, flushes: bool = True, announced: Announced = Announced.NOTHING
) -> RankPlan:
    """Return the plan of ``rank`` in ``schedule``; see ``plan_orders``."""
    return plan_orders(Orders.of(schedule, announced), rank, flushes, lenders_of(schedule, rank))


def plan_orders(
    orders: Orders, rank: int, flushes: bool = True, lenders: Mapping[Action, Action] = NO_LENDERS
) -> RankPlan:
    """Return the plan of ``rank`` where all ranks follow ``orders``; it runs with known shapes too.

    Unless it ``flushes``, messages may stay in flight, for a later step to take.  ``lenders`` are the W whose
    products run inside I.
    """
    *launches, left_open = planned_launches(orders)[rank]
    actions = tuple(orders.by_rank[rank])
    order = RankOrder(rank, orders.stages, actions, tuple(together(actions, orders.paired)), orders.copies)
    extensions = tuple(filter(None, (feature.extension(order) for feature in FEATURES)))
    planner = _RankPlanner(rank, orders, extensions, lenders)
    by_step: list[StepOperations] = []
    place = 0
    for step in order.steps:
        first = tuple(operation for extension in planner.extensions for operation in extension.before(step))
        launched = tuple(map(planner.launch, launches[place]))
        by_step.append(StepOperations(first, launched, tuple(planner.around(step))))
        place += len(step)
    at_end = [*map(planner.launch, left_open)]
    for extension in planner.extensions:
        at_end += extension.at_end()
    if flushes:
        at_end.append(Drain())
    return RankPlan(rank, actions, order.steps, tuple(by_step), tuple(at_end))


@dataclass(frozen=True, slots=True)
class _RankPlanner:
    """Makes the operations of ``rank``."""

    rank: int
    orders: Orders
    extensions: tuple[Extension, ...]
    lenders: Mapping[Action, Action]

    def launch(self, launch: Launch) -> Operation:
        """Return the operation for a launch that concerns other ranks."""
        if isinstance(launch, Arrival):
            return Post(*launch, self._repeats(launch.message))
        return _first(launch, (extension.launched(launch) for extension in self.extensions))

    def around(self, actions: tuple[Action, ...]) -> Iterator[Operation]:
        """Yield the operations of an action, or of a pair: their inputs, their work and their outputs."""
        works = [self._work(action) for action in actions]
        of_stages = [work for work in works if isinstance(work, Compute)]
        yield from self._inputs(of_stages)
        if len(works) > 1:
            yield _first(actions, (extension.joined(of_stages) for extension in self.extensions))
        else:
            yield from works
        yield from self._outputs(of_stages)
        for extension in self.extensions:
            yield from extension.after(of_stages)

    def _work(self, action: Action) -> Operation:
        if action.kind not in OF_STAGES:
            return _first(action, (extension.work(action) for extension in self.extensions))
        stages = self.orders.stages
        source, target = incoming_message(action, stages), outgoing_message(action, stages)
        work = Compute(action, source, target, lender=self.lenders.get(action))
        for extension in self.extensions:
            work = extension.extended(work)
        return work

    def _inputs(self, works: Iterable[Compute]) -> Iterator[Operation]:
        for source in filter(None, (work.source for work in works)):
            if not 0 <= source.sender < self.orders.stages:
                if operation := next(
                    filter(None, (extension.taken(source) for extension in self.extensions)), None
                ):
                    yield operation
            elif (sender := self.orders.rank_of(source.sender, source.microbatch)) != self.rank:
                yield Receive(sender, source)

    def _outputs(self, works: Iterable[Compute]) -> Iterator[Operation]:
        for target in filter(None, (work.target for work in works)):
            if not 0 <= target.receiver < self.orders.stages:
                yield _first(target, (extension.handed_over(target) for extension in self.extensions))
            elif (receiver := self.orders.rank_of(target.receiver, target.microbatch)) != self.rank:
                yield Send(receiver, target, self._repeats(target))

    def _repeats(self, message: Message) -> bool:
        """Whether the receiver knows the shape of an activation, by an earlier one of the microbatch."""
        is_activation = message.sender < message.receiver
        return is_activation and self.orders.is_repeated(message.receiver, message.microbatch)


def _first(what: object, operations: Iterable[Operation | None]) -> Operation:
    """Return the first operation that an extension has for ``what``; ValueError without any."""
    operation = next(filter(None, operations), None)
    if operation is None:
        raise ValueError(f"nothing plans {what}: add the feature that does (features.add)")
    return operation
