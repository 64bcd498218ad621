"""A forward and a backward that run together, so that each computes while the other one communicates."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_pp_ext.runtime.operations import Compute, Extension, Operation, in_profile
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule.actions import Action

type _Tensor = torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PairRunner:
    """Runs the two actions of a pair together.

    ``run`` gets the rank's stages by number, and (forward, activation, backward, gradient); it returns the
    output and the gradient of the input.  The tensors are those of ``Stage.forward``, ``Stage.backward`` and
    ``Stage.backward_input``.
    """

    run: Callable[[Mapping[int, Any], Action, _Tensor, Action, _Tensor], tuple[torch.Tensor, _Tensor]]


@dataclass(frozen=True, slots=True)
class Pair(Operation):
    """The two actions of a pair; their messages come before and after it."""

    forward: Compute
    backward: Compute

    def run(self, rank: Rank) -> None:
        """See ``Operation``; without a ``PairRunner`` one action follows the other."""
        runner = rank.find(PairRunner)
        if runner is None:
            self.forward.run(rank)
            self.backward.run(rank)
            return
        forward, backward = self.forward.action, self.backward.action
        # The forward is recorded within the backward, so that it is the first of the two in the record.
        with (
            in_profile(f"{forward};{backward}"),
            rank.recorder.during(backward),
            rank.recorder.during(forward),
            self.forward.surrounded(rank),
        ):
            output, gradient = runner.run(
                rank.stages,
                forward,
                rank.take(self.forward.source),
                backward,
                rank.take(self.backward.source),
            )
        rank.leave(self.forward.target, output)
        rank.leave(self.backward.target, gradient)


class PairsOfRank(Extension):
    """The pairs of one rank."""

    def joined(self, works: Iterable[Compute]) -> Operation:
        return Pair(*works)
