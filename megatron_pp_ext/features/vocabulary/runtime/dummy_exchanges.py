"""Exchanges for a rank that runs without the others of its pipeline."""

from typing import Any

import torch
import torch.distributed as dist

from megatron_pp_ext.features.vocabulary.runtime.exchanges import Exchanges
from megatron_pp_ext.runtime.dummy_channels import Done, random_numbers


class DummyExchanges(Exchanges):
    """The exchanges of a rank that runs alone with its part of a vocabulary of ``rows`` rows.

    The broadcasts of other ranks are random: tokens and labels of the whole vocabulary, and small numbers.
    Sums are this rank's own part, and every rank's statistics are this rank's.
    """

    def __init__(self, pipeline: dist.ProcessGroup, everyone: dist.ProcessGroup, rows: int) -> None:
        super().__init__(pipeline, everyone)
        self._rows = rows

    def broadcast(self, tensor: torch.Tensor, home: int) -> Any:
        if home != self._pipeline.rank():
            if tensor.is_floating_point():
                tensor.copy_(random_numbers(tensor.shape, tensor.dtype, tensor.device))
            else:
                tensor.random_(self._rows)
        return Done()

    def reduce(self, tensor: torch.Tensor, home: int) -> Any:
        return Done()

    def gather(self, part: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return part.repeat(self._everyone.size(), *(1 for _ in part.shape)), Done()
