"""Channels for a rank that runs without its neighbours."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from megatron_pp_ext.runtime.channels import Channels

SCALE = 0.01
"""Standard deviation of the random numbers: small enough, as gradients, for weights to stay finite."""


class Done:
    """Stands for a message that has arrived, as a ``torch.distributed.Work`` does."""

    def wait(self) -> bool:
        """Return at once."""
        return True


class DummyChannels(Channels):
    """The channels of a rank that runs alone: messages that it sends are dropped, those received are random.

    Receives are posted, kept and released when real ones would be, so that they take the same memory.
    Zeros would be faster to compute with than real numbers, and uninitialized memory may not be finite.
    """

    def _send(self, peer: int, *tensors: torch.Tensor) -> None:
        pass

    def _receive(self, peer: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        return random_numbers(torch.Size(self._shape), self._dtype, self._device).clone(), Done()


@cache
def random_numbers(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return small random numbers, the same ones for every call."""
    generator = torch.Generator().manual_seed(0)
    return (SCALE * torch.randn(shape, generator=generator)).to(device=device, dtype=dtype)
