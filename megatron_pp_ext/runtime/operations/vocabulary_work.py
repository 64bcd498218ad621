"""A rank's part of a vocabulary that all ranks share (``features.vocabulary``).

It stands where a stage before the first one would, and one behind the last: it gives the first stage its
input, takes the last stage's output and gives its gradient, and takes the gradient of the input.  Between
these, every rank computes its part of the logits.
"""

from dataclasses import dataclass

from megatron_pp_ext.runtime.operations.compute import Compute
from megatron_pp_ext.runtime.operations.operation import Operation, Recorded
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.shared_vocabulary import SharedVocabulary
from megatron_pp_ext.schedule.messages import Exchange, Message


@dataclass(frozen=True, slots=True)
class Begin(Operation):
    """Begin an exchange with the other ranks; what is computed next does not wait for it."""

    exchange: Exchange

    def run(self, rank: Rank) -> None:
        """See ``Operation``."""
        _of(rank).launch(self.exchange)


@dataclass(frozen=True, slots=True)
class TakeEmbedded(Operation):
    """Let the first stage's forward wait for its input."""

    message: Message

    def run(self, rank: Rank) -> None:
        """See ``Operation``."""
        rank.tensors[self.message] = _of(rank).embedding.embedded(self.message.microbatch)


@dataclass(frozen=True, slots=True)
class KeepOutput(Operation):
    """Keep the last stage's output for the exchange that gives it to all ranks."""

    message: Message

    def run(self, rank: Rank) -> None:
        """See ``Operation``."""
        hidden = rank.take(self.message)
        assert hidden is not None
        _of(rank).output.keep(self.message.microbatch, hidden)


@dataclass(frozen=True, slots=True)
class Logits(Recorded):
    """S: this rank's part of the logits, and of all that follows from them."""

    def perform(self, rank: Rank) -> None:
        """See ``Recorded``."""
        _of(rank).output.logits(self.action.microbatch)


@dataclass(frozen=True, slots=True)
class LossBackward(Compute):
    """The last stage's backward, of which the gradient of the loss is the beginning."""

    def perform(self, rank: Rank) -> None:
        """See ``Recorded``."""
        assert self.source is not None
        rank.tensors[self.source] = _of(rank).output.output_gradient(self.action.microbatch)
        # Written out, since a class with slots is another one than the one that super() was written in.
        Compute.perform(self, rank)


@dataclass(frozen=True, slots=True)
class WeightGradient(Recorded):
    """T: the gradient of this rank's part of the output weight."""

    def perform(self, rank: Rank) -> None:
        """See ``Recorded``."""
        _of(rank).output.weight_gradient(self.action.microbatch)


@dataclass(frozen=True, slots=True)
class KeepInputGradient(Operation):
    """Keep the gradient of the first stage's input for the exchange; a frozen embedding has none."""

    message: Message

    def run(self, rank: Rank) -> None:
        """See ``Operation``."""
        _of(rank).embedding.take(self.message.microbatch, rank.tensors.pop(self.message))


@dataclass(frozen=True, slots=True)
class Close(Operation):
    """End the step: all gradients are added."""

    def run(self, rank: Rank) -> None:
        """See ``Operation``."""
        vocabulary = _of(rank)
        vocabulary.embedding.close()
        vocabulary.output.close()


def _of(rank: Rank) -> SharedVocabulary:
    if rank.vocabulary is None:
        raise ValueError("the plan is for ranks that share a vocabulary, and this rank has no part of it")
    return rank.vocabulary
