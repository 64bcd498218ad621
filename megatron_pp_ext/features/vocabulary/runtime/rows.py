"""A rank's rows of a weight of which all ranks of a pipeline hold a part."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """``count`` rows, ``first`` and following, of the embedding or of the output weight.

    ``weight()`` returns them, rows x hidden, whenever they are needed; ``add_gradient`` adds to their
    gradient.  Frozen rows have none, ``takes_gradient`` is unset then: on all ranks, or on none.
    """

    first: int
    count: int
    weight: Callable[[], torch.Tensor]
    add_gradient: Callable[[torch.Tensor], None]
    takes_gradient: bool = True

    def held(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether each token's row is one of these, and its number here, 0 where it is not."""
        row = tokens - self.first
        is_local = (row >= 0) & (row < self.count)
        return is_local, row * is_local
