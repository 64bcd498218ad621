"""Brings losses and counts of tokens from the rank with the last stage to the last rank.

Under a V the last stage may be on the pipeline's first rank.  Megatron logs losses, and the losses of
multi-token prediction, from the last rank, and divides gradients by the count of tokens that it finds there.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_pp_ext.integration.runners.message_groups import device
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.integration.runners.transport import ProcessGroups
from megatron_pp_ext.runtime.object_send import ObjectSend
from megatron_pp_ext.schedule.placement import Placement


class LossesOnLastRank:
    """The loss store of a step where stock has it; ``pipeline_runner.Losses``.

    Where another rank computes the losses, they travel to the last one with the messages down the pipeline.
    """

    def __init__(self, placement: Placement, transport: ProcessGroups) -> None:
        self._holder = placement.rank_of(placement.stages - 1)
        self._reader = placement.ranks - 1
        self._transport = transport
        self._object_send: ObjectSend | None = None

    def tokens(self, inputs: StepInputs) -> torch.Tensor:
        tokens, rank, connection = inputs.tokens, inputs.group.rank(), self._connection(inputs)
        if connection is not None and rank == self._holder:
            dist.send(tokens.to(connection.wire), connection.receiver, group=connection.group)
        elif connection is not None and rank == self._reader:
            received = torch.empty_like(tokens, device=connection.wire)
            dist.recv(received, connection.sender, group=connection.group)
            return received.to(tokens.device)
        return tokens

    def losses(self, inputs: StepInputs) -> list[Any]:
        """See ``pipeline_runner.Losses``.

        The losses of MTP move into the last rank's tracker.
        """
        rank, connection = inputs.group.rank(), self._connection(inputs)
        if connection is None:
            return inputs.losses
        if rank == self._holder:
            connection.send(losses=inputs.losses, mtp_losses=_take_mtp_losses())
        elif rank == self._reader:
            received = connection.receive()
            _put_mtp_losses(received["mtp_losses"])
            return list(received["losses"])
        return []

    def _connection(self, inputs: StepInputs) -> ObjectSend | None:
        """Return the connection that brings losses to the last rank; None if that computes them itself."""
        if self._holder != self._reader and self._object_send is None:
            down, _ = self._transport.directions(inputs.group)
            ranks = dist.get_process_group_ranks(inputs.group)
            self._object_send = ObjectSend(ranks[self._holder], ranks[self._reader], down, device())
        return self._object_send


def _take_mtp_losses() -> dict[str, torch.Tensor]:
    """Remove from this rank's tracker the sums since the last log entry, and return them."""
    tracker = MTPLossLoggingHelper.tracker
    sums = [name for name, value in tracker.items() if isinstance(value, torch.Tensor)]
    return {name: tracker.pop(name) for name in sums}


def _put_mtp_losses(sums: dict[str, torch.Tensor]) -> None:
    """Make ``sums`` this rank's, to be averaged over the data-parallel ranks of its stage."""
    if sums:
        average_over = parallel_state.get_data_parallel_group(with_context_parallel=True)
        MTPLossLoggingHelper.tracker.update(sums, avg_group=average_over)
