"""What tensor parallelism adds to an output layer that all ranks of a pipeline share."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """The ranks of ``group``, each of which has a pipeline of its own, with other rows of the weight.

    Under sequence parallelism the last stage's output is cut into ``parts`` by tokens, in the ranks' order;
    else every rank has all of it.  Without a group there is no tensor parallelism.
    """

    group: dist.ProcessGroup | None = None
    parts: int = 1

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of all tokens, from those that the last stage's output has here."""
        if self.parts == 1:
            return hidden
        whole = hidden.new_empty(hidden.shape[0] * self.parts, *hidden.shape[1:])
        dist.all_gather_into_tensor(whole, hidden, group=self.group)
        return whole

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sum the gradient of all tokens over the group, and return what belongs to the output here."""
        if self.group is None:
            return gradient
        if self.parts == 1:
            dist.all_reduce(gradient, group=self.group)
            return gradient
        mine = gradient.new_empty(gradient.shape[0] // self.parts, gradient.shape[1])
        dist.reduce_scatter_tensor(mine, gradient, group=self.group)
        return mine


ALONE = TensorRanks()
"""No tensor parallelism."""
