"""The work of a stage on a microbatch."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch

from megatron_pp_ext.runtime.activation_meter import Owner
from megatron_pp_ext.runtime.operations.operation import Recorded
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.messages import Message

Around = Callable[[Rank], AbstractContextManager[None]]
"""Returns the context in which a rank does a piece of work."""


@dataclass(frozen=True, slots=True)
class Compute(Recorded):
    """An F, I, W or B: takes the tensor ``source``, if any, and leaves the tensor ``target``, if any.

    Features may surround a forward with contexts of theirs, ``around``.  While messages of an I travel,
    products of its ``lender`` run, which is a W (``schedule.beside``).
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
