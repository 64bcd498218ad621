"""A forward and a backward that run together, so that each computes while the other one communicates."""

from dataclasses import dataclass

from megatron_pp_ext.runtime.operations.compute import Compute
from megatron_pp_ext.runtime.operations.operation import Operation, in_profile
from megatron_pp_ext.runtime.rank import Rank


@dataclass(frozen=True, slots=True)
class Pair(Operation):
    """The two actions of a pair; their messages come before and behind it."""

    forward: Compute
    backward: Compute

    def run(self, rank: Rank) -> None:
        """See ``Operation``; where nothing runs pairs, one action follows the other."""
        if rank.pairs is None:
            self.forward.run(rank)
            self.backward.run(rank)
            return
        ahead, behind = self.forward.action, self.backward.action
        # The forward is recorded within the backward, so that it is the first of the two in the record.
        with (
            in_profile(f"{ahead};{behind}"),
            rank.recorder.during(behind),
            rank.recorder.during(ahead),
            self.forward.saving(rank),
        ):
            output, gradient = rank.pairs(
                ahead, rank.take(self.forward.source), behind, rank.take(self.backward.source)
            )
        rank.leave(self.forward.target, output)
        rank.leave(self.backward.target, gradient)
