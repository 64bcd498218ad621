"""A rank's part of a vocabulary that all ranks share, and its places in a plan.

It stands where a stage before the first one would, and one after the last: it gives the first stage its
input, takes the last stage's output and gives its gradient, and takes the gradient of the input.  Between
these, every rank computes its part of the logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_pp_ext.features.vocabulary.runtime.output import SharedVocabulary
from megatron_pp_ext.runtime.operations import Compute, Extension, Operation, Recorded
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.messages import Exchange, Launch, Message


@dataclass(frozen=True, slots=True)
class Begin(Operation):
    """Begin an exchange with the other ranks; later computation does not wait for it."""

    exchange: Exchange

    def run(self, rank: Rank) -> None:
        rank.part(SharedVocabulary).launch(self.exchange)


@dataclass(frozen=True, slots=True)
class TakeEmbedded(Operation):
    """Let the first stage's forward wait for its input."""

    message: Message

    def run(self, rank: Rank) -> None:
        rank.tensors[self.message] = rank.part(SharedVocabulary).embedding.embedded(self.message.microbatch)


@dataclass(frozen=True, slots=True)
class KeepOutput(Operation):
    """Keep the last stage's output for the exchange that gives it to all ranks."""

    message: Message

    def run(self, rank: Rank) -> None:
        hidden = rank.take(self.message)
        assert hidden is not None
        rank.part(SharedVocabulary).output.keep(self.message.microbatch, hidden)


@dataclass(frozen=True, slots=True)
class Logits(Recorded):
    """S: this rank's part of the logits, and of all that follows from them."""

    def perform(self, rank: Rank) -> None:
        rank.part(SharedVocabulary).output.logits(self.action.microbatch)


@dataclass(frozen=True, slots=True)
class LossBackward(Compute):
    """The last stage's backward, of which the gradient of the loss is the beginning."""

    def perform(self, rank: Rank) -> None:
        assert self.source is not None
        rank.tensors[self.source] = rank.part(SharedVocabulary).output.output_gradient(self.action.microbatch)
        # Written out, since a class with slots is another one than the one that super() was written in.
        Compute.perform(self, rank)


@dataclass(frozen=True, slots=True)
class WeightGradient(Recorded):
    """T: the gradient of this rank's part of the output weight."""

    def perform(self, rank: Rank) -> None:
        rank.part(SharedVocabulary).output.weight_gradient(self.action.microbatch)


@dataclass(frozen=True, slots=True)
class KeepInputGradient(Operation):
    """Keep the gradient of the first stage's input for the exchange; a frozen embedding has none."""

    message: Message

    def run(self, rank: Rank) -> None:
        rank.part(SharedVocabulary).embedding.take(self.message.microbatch, rank.tensors.pop(self.message))


@dataclass(frozen=True, slots=True)
class Close(Operation):
    """End the step: all gradients are added."""

    def run(self, rank: Rank) -> None:
        vocabulary = rank.part(SharedVocabulary)
        vocabulary.embedding.close()
        vocabulary.output.close()


class PartOfRank(Extension):
    """A rank's part of the vocabulary, with a model of ``stages`` stages.

    The rank is the sender of the first stage's input, as a stage before it, and the receiver of the last
    stage's output, as a stage after it.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages

    def work(self, action: Action) -> Operation | None:
        match action.kind:
            case Kind.S:
                return Logits(action)
            case Kind.T:
                return WeightGradient(action)
        return None

    def extended(self, work: Compute) -> Compute:
        """See ``Extension``: the first and the last stage take from the vocabulary, and give to it."""
        (stage, kind, microbatch), stages = work.action, self._stages
        if kind is Kind.W:
            return work
        is_forward = kind is Kind.F
        if stage == 0 and is_forward:
            work = replace(work, source=Message(-1, 0, microbatch))
        elif stage == 0:
            work = replace(work, target=Message(0, -1, microbatch))
        if stage < stages - 1:
            return work
        if is_forward:
            return replace(work, target=Message(stage, stages, microbatch))
        return LossBackward(work.action, Message(stages, stage, microbatch), work.target, work.around)

    def launched(self, launch: Launch) -> Operation | None:
        return Begin(launch) if isinstance(launch, Exchange) else None

    def taken(self, message: Message) -> Operation | None:
        """See ``Extension``; the last stage's backward takes its gradient itself."""
        return TakeEmbedded(message) if message.sender < 0 else None

    def handed_over(self, message: Message) -> Operation:
        return KeepInputGradient(message) if message.receiver < 0 else KeepOutput(message)

    def at_end(self) -> Iterator[Operation]:
        yield Close()
