"""One rank's operations in a step, from the order of actions and from what all ranks launch with them.

Every rank derives the same messages from the same schedule, so sender and receiver agree on the order of
the messages, and on the place of each receive (``schedule.messages``), without communicating.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.runtime.extension import Extension, RankOrder
from megatron_pp_ext.runtime.operations import transfers
from megatron_pp_ext.runtime.operations.compute import Compute
from megatron_pp_ext.runtime.operations.operation import Operation
from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Schedule, together
from megatron_pp_ext.schedule.announcements import Announced, Announcements, RankOf
from megatron_pp_ext.schedule.copies import Copies
from megatron_pp_ext.schedule.messages import (
    Arrival,
    Launch,
    Message,
    incoming_message,
    outgoing_message,
    planned_launches,
)
from megatron_pp_ext.schedule.program import Orders
from megatron_pp_ext.schedule.timing import lenders_of

NO_COPIES = Copies()
"""All activations stay on the device."""
NO_LENDERS: Mapping[Action, Action] = MappingProxyType({})
"""Every product of a W runs in that W."""


@dataclass(frozen=True, slots=True)
class StepOperations:
    """The operations of one step of a rank: what comes ``first``, what is launched, and the ``work``."""

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
        found: list[Operation] = []
        for one in self.by_step:
            found += (*one.first, *one.launches, *one.work)
        object.__setattr__(self, "operations", (*found, *self.at_end))

    def has(self, kind: type[Operation]) -> bool:
        """Return whether any operation is of this ``kind``."""
        return any(isinstance(operation, kind) for operation in self.operations)


def plan_rank(
    schedule: Schedule, rank: int, flushes: bool = True, announced: Announced = Announced.NOTHING
) -> RankPlan:
    """Return the plan of ``rank`` in ``schedule``; see ``plan_orders``."""
    placement = schedule.placement
    at = placement.rank_of
    return plan_orders(
        schedule.orders,
        placement.stages,
        lambda stage, _: at(stage),
        rank,
        schedule.paired,
        flushes,
        schedule.copies,
        placement.ends_on_last,
        schedule.durations,
        announced,
        lenders_of(schedule, rank),
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
    durations: Sequence[Sequence[int]] = (),
    announced: Announced = Announced.NOTHING,
    lenders: Mapping[Action, Action] = NO_LENDERS,
) -> RankPlan:
    """Return the plan of ``rank`` where all ranks follow ``orders`` with a model of ``stages`` stages.

    Unless it ``flushes``, messages may stay in flight, for a later step to take.  ``ends_on_last`` is that of
    the placement, and ``durations`` are those of the schedule.  ``announced`` are the messages that announce
    their shapes; the plan runs with known shapes too.  ``lenders`` are the W whose products run inside I.
    """
    line = paired, ends_on_last, durations, announced
    *launches, left_open = planned_launches(orders, stages, rank_of, *line)[rank]
    actions = tuple(orders[rank])
    order = RankOrder(rank, stages, actions, tuple(together(actions, paired)), copies)
    announcements = Announcements(announced, rank_of)
    extensions = tuple(filter(None, (feature.extension(order) for feature in FEATURES)))
    planner = _Planner(rank, stages, rank_of, extensions, announcements, lenders)
    by_step: list[StepOperations] = []
    place = 0
    for step in order.steps:
        first = tuple(operation for one in planner.extensions for operation in one.before(step))
        launched = tuple(map(planner.launch, launches[place]))
        by_step.append(StepOperations(first, launched, tuple(planner.around(step))))
        place += len(step)
    at_end = [*map(planner.launch, left_open)]
    for one in planner.extensions:
        at_end += one.at_end()
    if flushes:
        at_end.append(transfers.Drain())
    return RankPlan(rank, actions, order.steps, tuple(by_step), tuple(at_end))


@dataclass(frozen=True, slots=True)
class _Planner:
    """Makes the operations of ``rank``."""

    rank: int
    stages: int
    rank_of: RankOf
    extensions: tuple[Extension, ...]
    announcements: Announcements
    lenders: Mapping[Action, Action]

    def launch(self, launch: Launch) -> Operation:
        """Return the operation for what the rank launches together with others."""
        if isinstance(launch, Arrival):
            return transfers.Post(*launch, self._repeats(launch.message))
        return _first(launch, (one.launched(launch) for one in self.extensions))

    def around(self, actions: tuple[Action, ...]) -> Iterator[Operation]:
        """Yield the operations of an action, or of a pair: their inputs, their work and their outputs."""
        works = [self._work(action) for action in actions]
        of_stages = [work for work in works if isinstance(work, Compute)]
        yield from self._inputs(of_stages)
        if len(works) > 1:
            yield _first(actions, (one.joined(of_stages) for one in self.extensions))
        else:
            yield from works
        yield from self._outputs(of_stages)
        for one in self.extensions:
            yield from one.after(of_stages)

    def _work(self, action: Action) -> Operation:
        if action.kind not in OF_STAGES:
            return _first(action, (one.work(action) for one in self.extensions))
        source, target = incoming_message(action, self.stages), outgoing_message(action, self.stages)
        work = Compute(action, source, target, lender=self.lenders.get(action))
        for one in self.extensions:
            work = one.extended(work)
        return work

    def _inputs(self, works: Iterable[Compute]) -> Iterator[Operation]:
        for source in filter(None, (work.source for work in works)):
            if not 0 <= source.sender < self.stages:
                if taken := next(filter(None, (one.taken(source) for one in self.extensions)), None):
                    yield taken
            elif (sender := self.rank_of(source.sender, source.microbatch)) != self.rank:
                yield transfers.Receive(sender, source)

    def _outputs(self, works: Iterable[Compute]) -> Iterator[Operation]:
        for target in filter(None, (work.target for work in works)):
            if not 0 <= target.receiver < self.stages:
                yield _first(target, (one.handed_over(target) for one in self.extensions))
            elif (receiver := self.rank_of(target.receiver, target.microbatch)) != self.rank:
                yield transfers.Send(receiver, target, self._repeats(target))

    def _repeats(self, message: Message) -> bool:
        """Whether the receiver knows the shape of an activation, by an earlier one of the microbatch."""
        is_activation = message.sender < message.receiver
        return is_activation and self.announcements.is_repeated(message.receiver, message.microbatch)


def _first(what: object, found: Iterable[Operation | None]) -> Operation:
    """Return the first operation that an extension has for ``what``; ValueError without any."""
    operation = next(filter(None, found), None)
    if operation is None:
        raise ValueError(f"nothing plans {what}: add the feature that does (features.add)")
    return operation
