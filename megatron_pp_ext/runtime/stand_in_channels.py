"""Messages of neighbours that are not there."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from megatron_pp_ext.runtime.channels import Channels

SCALE = 0.01
"""Standard deviation of the made-up numbers: small enough, as gradients, for weights to stay finite."""


class _Done:
    """A message that needs no waiting for."""

    def wait(self) -> bool:
        """It is here."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


class MadeUpChannels(Channels):
    """The messages of a rank that runs alone: what it sends is dropped, what it receives is random.

    Receives are posted, kept and let go when real ones would be, so that they take their memory.  Zeros
    would be quicker to compute with than real numbers, and what memory happens to hold may not be finite.
    """

    @cached_property
    def _numbers(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        numbers = SCALE * torch.randn(self._shape, generator=generator)
        return numbers.to(device=self._device, dtype=self._dtype)

    def _send(self, peer: int, tensor: torch.Tensor) -> None:
        pass

    def _receive(self, peer: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        return self._numbers.clone(), _Done()
