"""Channels and exchanges for a rank that runs without its neighbours."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.vocabulary_exchanges import Exchanges

SCALE = 0.01
"""Standard deviation of the made-up numbers: small enough, as gradients, for weights to stay finite."""


class _Done:
    """Stands for a message that has arrived, as a ``torch.distributed.Work`` does."""

    def wait(self) -> bool:
        """Return at once."""
        return True


class MadeUpChannels(Channels):
    """The channels of a rank that runs alone: messages that it sends are dropped, those received are random.

    Receives are posted, kept and released when real ones would be, so that they take the same memory.
    Zeros would be faster to compute with than real numbers, and uninitialized memory may not be finite.
    """

    def _send(self, peer: int, tensor: torch.Tensor) -> None:
        pass

    def _receive(self, peer: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        return _numbers(torch.Size(self._shape), self._dtype, self._device).clone(), _Done()


class MadeUpExchanges(Exchanges):
    """The exchanges of a rank that runs alone with its part of a vocabulary of ``rows`` rows.

    What other ranks would broadcast is random: tokens and labels of the whole vocabulary, and small numbers.
    Sums are this rank's own part, and every rank's statistics are this rank's.
    """

    def __init__(self, pipeline: dist.ProcessGroup, everyone: dist.ProcessGroup, rows: int) -> None:
        super().__init__(pipeline, everyone)
        self._rows = rows

    def broadcast(self, tensor: torch.Tensor, home: int) -> Any:
        """See ``Exchanges``."""
        if home != self._pipeline.rank():
            if tensor.is_floating_point():
                tensor.copy_(_numbers(tensor.shape, tensor.dtype, tensor.device))
            else:
                tensor.random_(self._rows)
        return _Done()

    def reduce(self, tensor: torch.Tensor, home: int) -> Any:
        """See ``Exchanges``."""
        return _Done()

    def gather(self, part: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See ``Exchanges``."""
        return part.repeat(self._everyone.size(), *(1 for _ in part.shape)), _Done()


@cache
def _numbers(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return small random numbers, the same ones for every call."""
    generator = torch.Generator().manual_seed(0)
    return (SCALE * torch.randn(shape, generator=generator)).to(device=device, dtype=dtype)
