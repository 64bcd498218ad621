"""Brings losses and counts of tokens from the rank with the last stage to the last rank.

Under a V the last stage is on the pipeline's first rank.  Megatron logs losses, and the losses of multi-token
prediction, from the last rank, and divides gradients by the count of tokens that it finds there.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_pp_ext.integration.runners.message_groups import device
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.integration.runners.transport import ProcessGroups
from megatron_pp_ext.runtime.groups import wire_of
from megatron_pp_ext.runtime.parcel import Parcels
from megatron_pp_ext.schedule.placement import Placement


class LossesOnLastRank:
    """The loss store of a step where stock has it; ``pipeline_runner.Losses``."""

    def __init__(self, placement: Placement, transport: ProcessGroups) -> None:
        self._holder = placement.rank_of(placement.stages - 1)
        self._transport = transport
        self._transfer: LossTransfer | None = None

    def tokens(self, inputs: StepInputs, group: dist.ProcessGroup) -> torch.Tensor:
        """See ``pipeline_runner.Losses``."""
        transfer = self._of(group)
        return transfer.bring_tokens(inputs.tokens) if transfer else inputs.tokens

    def losses(self, inputs: StepInputs, group: dist.ProcessGroup) -> list[Any]:
        """See ``pipeline_runner.Losses``."""
        transfer = self._of(group)
        return transfer.bring_losses(inputs.losses) if transfer else inputs.losses

    def _of(self, group: dist.ProcessGroup) -> "LossTransfer | None":
        """Return what brings losses to the last rank of ``group``; None if that rank computes them itself."""
        if self._holder == group.size() - 1:
            return None
        if self._transfer is None:
            down, _ = self._transport.directions(group)
            self._transfer = LossTransfer(self._holder, group, down, device())
        return self._transfer


class LossTransfer:
    """Brings a step's losses from pipeline rank ``holder`` to the last of ``group``; every rank has one.

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
        """Return the step's count of tokens, a scalar: the holder's on the holder and on the last rank."""
        if self._is_holder:
            dist.send(tokens.to(self._wire), self._reader, group=self._down)
        elif self._is_reader:
            counted = torch.empty_like(tokens, device=self._wire)
            dist.recv(counted, self._holder, group=self._down)
            return counted.to(tokens.device)
        return tokens

    def bring_losses(self, losses: list[Any]) -> list[Any]:
        """Return the loss store on the last rank and an empty one elsewhere.

        The losses of multi-token prediction move into the last rank's tracker.
        """
        if self._is_holder:
            self._parcels.send(losses=losses, mtp_losses=_take_mtp_losses())
        elif self._is_reader:
            received = self._parcels.receive()
            _put_mtp_losses(received["mtp_losses"])
            return list(received["losses"])
        return []


def _take_mtp_losses() -> dict[str, torch.Tensor]:
    """Remove from this rank's tracker the sums since the last log entry, and return them."""
    tracker = MTPLossLoggingHelper.tracker
    sums = [name for name, value in tracker.items() if isinstance(value, torch.Tensor)]
    return {name: tracker.pop(name) for name in sums}


def _put_mtp_losses(sums: dict[str, torch.Tensor]) -> None:
    """Make ``sums`` this rank's, to be averaged over the data-parallel ranks beside it."""
    if sums:
        average_over = parallel_state.get_data_parallel_group(with_context_parallel=True)
        MTPLossLoggingHelper.tracker.update(sums, avg_group=average_over)
