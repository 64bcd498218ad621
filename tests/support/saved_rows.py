"""A small tensor whose activation is saved for its backward, and may be offloaded."""

import torch

from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations
from megatron_pp_ext.runtime.split import Owner

ROWS, WIDTH = 4, 8
BYTES = 4 * ROWS * WIDTH
FIRST, SECOND = Owner(0, 0), Owner(0, 1)


def rows() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def saved(away: OffloadedActivations, owner: Owner) -> torch.Tensor:
    """Return the output of a function that saves a tensor of ``BYTES`` for its backward."""
    with away.saving(owner):
        return torch.nn.functional.gelu(rows() * 2)
