"""What the operations of one rank work with: its stages, its channels, and what one leaves for the next."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_pp_ext.runtime.activation_meter import Owner
from megatron_pp_ext.runtime.activations_away import ActivationsAway
from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.shared_vocabulary import SharedVocabulary
from megatron_pp_ext.schedule.actions import Action
from megatron_pp_ext.schedule.copies import Way
from megatron_pp_ext.schedule.messages import Message


class Stage(Protocol):
    """One stage of the model on this rank.

    Tensors that pass between stages are detached: a stage makes its input require a gradient
    itself and keeps what its backward will need, by microbatch.
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


type _Tensor = torch.Tensor | None

Pairs = Callable[[Action, _Tensor, Action, _Tensor], tuple[torch.Tensor, _Tensor]]
"""(forward, activation, backward, gradient) -> (output, input gradient): runs the actions of a pair together.

The tensors are those of ``Stage.forward``, ``Stage.backward`` and ``Stage.backward_input``.
"""


class Recorder(Protocol):
    """Is notified of every action; ``runtime.recorder`` has one that keeps their times and bytes."""

    def during(self, action: Action) -> AbstractContextManager[None]:
        """Return a context for the computation of ``action``, its messages excluded."""

    def copying(self, way: Way, owner: Owner) -> AbstractContextManager[None]:
        """Return a context for the copy of the activations of ``owner`` to the host, or of that back."""


class Unrecorded:
    """A ``Recorder`` that keeps nothing."""

    def during(self, action: Action) -> AbstractContextManager[None]:
        """See ``Recorder``."""
        return nullcontext()

    def copying(self, way: Way, owner: Owner) -> AbstractContextManager[None]:
        """See ``Recorder``."""
        return nullcontext()


@dataclass(slots=True)
class Rank:
    """One rank in one training step.

    ``stages`` maps the numbers of this rank's stages to the stages.  ``vocabulary`` is the rank's part of it
    where ranks share it.  ``pairs`` runs the pairs of the plan; without it their actions run, and are
    recorded, one after the other.  ``away`` are the activations that leave the device, where any do.
    ``tensors`` are those that one operation has left for another.
    """

    stages: Mapping[int, Stage]
    channels: Channels
    recorder: Recorder = field(default_factory=Unrecorded)
    pairs: Pairs | None = None
    vocabulary: SharedVocabulary | None = None
    away: ActivationsAway | None = None
    tensors: dict[Message, torch.Tensor | None] = field(default_factory=dict)

    @property
    def activations_away(self) -> ActivationsAway:
        """``away``; ValueError where a plan copies activations and the rank has nothing to do it with."""
        if self.away is None:
            raise ValueError(
                "the plan copies activations to the host: give the rank a Rank.away that does it"
            )
        return self.away

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
