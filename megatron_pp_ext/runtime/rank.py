"""What the operations of one rank work with: its stages, its channels, and what one leaves for the next."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.schedule.actions import Action, Label
from megatron_pp_ext.schedule.messages import Message


def print_rank_0(line: str) -> None:
    """Print ``line`` at once on the first rank of the job, or in a process that is no rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


class Stage(Protocol):
    """One stage of the model on this rank.

    Tensors that pass between stages are detached: a stage makes its input require a gradient
    itself and keeps the state for its backward, by microbatch.
    """

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        """Run the stage on ``activation``, or on the stage's own data where it is None, on the first stage.

        Return the input of the next stage; the last stage's output goes nowhere.
        """

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run both halves of the backward at once.

        ``gradient`` is that of the stage's output (None on the last stage).  Return that of its
        input (None on the first).
        """

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Compute the gradient of the input only, and leave the weights' for ``backward_weight``."""

    def backward_weight(self, microbatch: int) -> None:
        """Compute the gradient of the weights that ``backward_input`` left."""


class Recorder(Protocol):
    """Is notified of every action; ``runtime.recorder`` has one that keeps their times and bytes."""

    def during(self, action: Action) -> AbstractContextManager[None]:
        """Return a context for the computation of ``action``, its messages excluded."""

    def span(self, label: Label) -> AbstractContextManager[None]:
        """Return a context for what ``label`` names, in the stream that is the current one inside."""


class Unrecorded:
    """A ``Recorder`` that keeps nothing."""

    def during(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext()

    def span(self, label: Label) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(slots=True)
class Rank:
    """One rank in one training step.

    ``stages`` maps the numbers of this rank's stages to the stages.  ``parts`` are what operations of
    features work with, found by their class.  ``tensors`` are those that one operation has left for another.
    """

    stages: Mapping[int, Stage]
    channels: Channels
    recorder: Recorder = field(default_factory=Unrecorded)
    parts: Sequence[object] = ()
    tensors: dict[Message, torch.Tensor | None] = field(default_factory=dict)

    def find[P](self, kind: type[P]) -> P | None:
        """Return the part of this class, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def part[P](self, kind: type[P]) -> P:
        """Return the part of this class; ValueError where the rank has none."""
        part = self.find(kind)
        if part is None:
            raise ValueError(f"the plan needs a {kind.__name__}, which this rank lacks: add it to Rank.parts")
        return part

    def take(self, message: Message | None) -> torch.Tensor | None:
        """Return the tensor of ``message``, which this rank no longer holds then; None for no message.

        RuntimeError where the stage that should have made it produced nothing.
        """
        if message is None:
            return None
        tensor = self.tensors.pop(message)
        if tensor is None:
            raise RuntimeError(f"stage {message.sender} produced nothing for {message}")
        return tensor

    def leave(self, message: Message | None, tensor: torch.Tensor | None) -> None:
        """Keep ``tensor`` for the operation that takes ``message``; drop it where there is no message."""
        if message is not None:
            self.tensors[message] = None if tensor is None else tensor.detach()
