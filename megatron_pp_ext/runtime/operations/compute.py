"""The work of a stage on a microbatch."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from megatron_pp_ext.runtime.activation_meter import Owner
from megatron_pp_ext.runtime.operations.operation import Recorded
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.messages import Message


@dataclass(frozen=True, slots=True)
class Compute(Recorded):
    """An F, I, W or B: takes the tensor of ``source``, if any, and leaves that of ``target``, if any.

    ``leaves`` says of an F that its activations will leave the device.
    """

    source: Message | None = None
    target: Message | None = None
    leaves: bool = False

    def perform(self, rank: Rank) -> None:
        """See ``Recorded``."""
        number, kind, microbatch = self.action
        stage = rank.stages[number]
        produced: torch.Tensor | None = None
        match kind:
            case Kind.F:
                with self.saving(rank):
                    produced = stage.forward(microbatch, rank.take(self.source))
            case Kind.B:
                produced = stage.backward(microbatch, rank.take(self.source))
            case Kind.I:
                produced = stage.backward_input(microbatch, rank.take(self.source))
            case Kind.W:
                stage.backward_weight(microbatch)
            case _:
                raise ValueError(f"{self.action} is no work of a stage")
        rank.leave(self.target, produced)

    def saving(self, rank: Rank) -> AbstractContextManager[None]:
        """Return a context for the forward, which takes note of what it saves if that leaves."""
        if not self.leaves:
            return nullcontext()
        return rank.activations_away.saving(Owner(self.action.stage, self.action.microbatch))
