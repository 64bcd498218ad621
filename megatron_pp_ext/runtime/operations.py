"""What a rank can do in a step: a class for each operation, which runs itself, and what a feature adds."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.profiler import record_function

from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.split import STORE, Owner
from megatron_pp_ext.schedule.actions import Action, Copies, Kind
from megatron_pp_ext.schedule.messages import Launch, Message


def in_profile(name: str) -> AbstractContextManager[object]:
    """Return a context that torch's profiler shows under ``name``; it does nothing while none is running."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


class Operation(Protocol):
    """One piece of a rank's work.

    Operations hand tensors to each other through ``Rank.tensors`` and keep nothing themselves, so that the
    same plan runs in every step.
    """

    def run(self, rank: Rank) -> None:
        """Do the work."""


@dataclass(frozen=True, slots=True)
class Recorded(Operation):
    """An action of the schedule, whose computation is reported to the recorder."""

    action: Action

    def run(self, rank: Rank) -> None:
        with in_profile(str(self.action)), rank.recorder.during(self.action):
            self.perform(rank)

    @abstractmethod
    def perform(self, rank: Rank) -> None:
        """Do the work that is recorded."""


Around = Callable[[Rank], AbstractContextManager[None]]
"""Returns the context in which a rank does a piece of work."""


@dataclass(frozen=True, slots=True)
class Compute(Recorded):
    """An F, I, W or B: takes the tensor ``source``, if any, and leaves the tensor ``target``, if any.

    Features may surround a forward with contexts of theirs, ``around``.  While messages of an I travel,
    products of its ``lender`` run, which is a W (``schedule.timing``).
    """

    source: Message | None = None
    target: Message | None = None
    around: tuple[Around, ...] = ()
    lender: Action | None = None

    def perform(self, rank: Rank) -> None:
        number, kind, microbatch = self.action
        stage = rank.stages[number]
        produced: torch.Tensor | None = None
        match kind:
            case Kind.F:
                with self.surrounded(rank):
                    produced = stage.forward(microbatch, rank.take(self.source))
            case Kind.B:
                produced = stage.backward(microbatch, rank.take(self.source))
            case Kind.I:
                with self._lending():
                    produced = stage.backward_input(microbatch, rank.take(self.source))
            case Kind.W:
                stage.backward_weight(microbatch)
            case _:
                raise ValueError(f"{self.action} is no work of a stage")
        rank.leave(self.target, produced)

    def _lending(self) -> AbstractContextManager[None]:
        if self.lender is None:
            return nullcontext()
        return STORE.beside(Owner(self.lender.stage, self.lender.microbatch))

    def surrounded(self, rank: Rank) -> ExitStack:
        """Return ``around`` as one context, which is entered already."""
        stack = ExitStack()
        for around in self.around:
            stack.enter_context(around(rank))
        return stack


@dataclass(frozen=True, slots=True)
class Post(Operation):
    """Post the receive of a message, for an action that may come much later.

    Where no shapes are known, one that ``repeats`` has the shape of the microbatch's earlier messages.
    """

    peer: int
    message: Message
    repeats: bool = False

    def run(self, rank: Rank) -> None:
        rank.channels.post(self.peer, self.message, self.repeats)


@dataclass(frozen=True, slots=True)
class Receive(Operation):
    """Let the next computation wait for a message whose receive is posted."""

    peer: int
    message: Message

    def run(self, rank: Rank) -> None:
        rank.tensors[self.message] = rank.channels.receive(self.peer, self.message)


@dataclass(frozen=True, slots=True)
class Send(Operation):
    """Begin to send an action's output to another rank; see ``Post``."""

    peer: int
    message: Message
    repeats: bool = False

    def run(self, rank: Rank) -> None:
        tensor = rank.take(self.message)
        assert tensor is not None
        rank.channels.send(self.peer, self.message, tensor, self.repeats)


@dataclass(frozen=True, slots=True)
class Drain(Operation):
    """End a step that flushes: wait until every message has left."""

    def run(self, rank: Rank) -> None:
        rank.channels.close()


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The actions of ``rank`` in a model of ``stages`` stages.

    ``order`` has them one by one; in ``steps`` the two actions of a pair are one tuple.  ``copies`` are those
    of the whole schedule.
    """

    rank: int
    stages: int
    order: tuple[Action, ...]
    steps: tuple[tuple[Action, ...], ...]
    copies: Copies


class Extension:
    """The part of a feature in the plan of one rank; this one adds nothing.

    A feature subclasses it, overrides what it needs, and returns one for the orders that use it
    (``Feature.extension``).
    """

    def work(self, action: Action) -> Operation | None:
        """Return the operation of an ``action`` that is no work of a stage; None where it is another's."""
        return None

    def extended(self, work: Compute) -> Compute:
        """Return the ``work`` of a stage as the feature needs it."""
        return work

    def joined(self, works: Iterable[Compute]) -> Operation | None:
        """Return the operation in which actions of one step run together; None where it is another's."""
        return None

    def launched(self, launch: Launch) -> Operation | None:
        """Return the operation of a launch of all ranks; None where it is another feature's."""
        return None

    def taken(self, message: Message) -> Operation | None:
        """Return the operation that brings an input that no stage has sent; None where it is another's."""
        return None

    def handed_over(self, message: Message) -> Operation | None:
        """Return the operation that takes what goes to no stage; None where it is another's."""
        return None

    def before(self, actions: tuple[Action, ...]) -> Iterable[Operation]:
        """Return the operations before ``actions``, before anything is launched or received for them."""
        return ()

    def after(self, works: Iterable[Compute]) -> Iterable[Operation]:
        """Return the operations after the ``works`` of a step and what these send."""
        return ()

    def at_end(self) -> Iterable[Operation]:
        """Return the operations that end a step."""
        return ()
