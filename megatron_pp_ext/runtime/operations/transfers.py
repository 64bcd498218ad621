"""Messages between ranks.  Stages of one rank exchange tensors without them."""

from dataclasses import dataclass

from megatron_pp_ext.runtime.operations.operation import Operation
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule.messages import Message


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
