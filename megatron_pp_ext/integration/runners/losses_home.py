"""Losses and counts of tokens on their way to the last rank, where Megatron looks for them.

A V has the last stage, and with it the losses, on the pipeline's first rank.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron_pp_ext.integration.runners import mtp_metrics
from megatron_pp_ext.runtime.groups import wire_of
from megatron_pp_ext.runtime.parcel import Parcels


class LossesHome:
    """One rank's part in bringing a step's losses from pipeline rank ``holder`` to the last of ``group``.

    They travel with the messages in the process group ``down``; ``device`` is where Megatron's tensors are.
    """

    def __init__(
        self, holder: int, group: dist.ProcessGroup, down: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._is_holder, self._is_reader = group.rank() == holder, group.rank() == group.size() - 1
        ranks = dist.get_process_group_ranks(group)
        self._holder, self._reader, self._down = ranks[holder], ranks[-1], down
        self._wire = wire_of(down, device)
        self._parcels = Parcels(self._holder, self._reader, down, device)

    def bring_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The step's count of tokens, a scalar: the holder's own on the holder and on the last rank."""
        if self._is_holder:
            dist.send(tokens.to(self._wire), self._reader, group=self._down)
        elif self._is_reader:
            counted = torch.empty_like(tokens, device=self._wire)
            dist.recv(counted, self._holder, group=self._down)
            return counted.to(tokens.device)
        return tokens

    def bring_losses(self, losses: list[Any]) -> list[Any]:
        """The loss store on the last rank, an empty one elsewhere; what is logged beside them comes too."""
        if self._is_holder:
            self._parcels.send((losses, mtp_metrics.take()))
        elif self._is_reader:
            losses, sums = self._parcels.receive()
            mtp_metrics.put(sums)
            return losses
        return []
