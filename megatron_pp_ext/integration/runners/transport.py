"""What carries messages and exchanges between the ranks of a pipeline."""

from typing import Protocol

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pp_ext.integration.runners.message_groups import (
    Directions,
    group_options,
    message_channels,
    message_groups,
)
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.integration.settings import Settings
from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.groups import collective_group
from megatron_pp_ext.runtime.vocabulary_exchanges import Exchanges


class Transport(Protocol):
    """Connects this rank with the others of its pipeline, or stands in for them.

    With ``is_alone`` there are no others, and so there is nothing for actions that run together to hide.
    """

    is_alone: bool

    def channels(self, inputs: StepInputs) -> Channels:
        """Return the channels of one step."""

    def exchanges(self, inputs: StepInputs) -> Exchanges:
        """Return the exchanges of the model's vocabulary, which the pipeline shares."""


class ProcessGroups:
    """Messages over process groups of their own, which the first call makes; a ``Transport``.

    That call is collective over the whole world, at a time when no message is on its way.
    """

    is_alone = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._directions: Directions | None = None
        self._exchanges: Exchanges | None = None
        self._last: Channels | None = None

    def directions(self, group: dist.ProcessGroup) -> Directions:
        """Return the process groups, down and up, of the messages in ``group``."""
        if self._directions is None:
            self._directions = message_groups(self._settings, dist.get_process_group_ranks(group))
        return self._directions

    def channels(self, inputs: StepInputs) -> Channels:
        """See ``Transport``; RuntimeError where the step before failed, whose messages are still there."""
        if self._last is not None and not self._last.is_closed:
            raise RuntimeError(
                "no step can follow one that failed: its messages may be on their way, and this step would "
                "take them for its own; end all ranks, and go on from a checkpoint"
            )
        ranks = dist.get_process_group_ranks(inputs.group)
        self._last = message_channels(ranks, self.directions(inputs.group), inputs)
        return self._last

    def exchanges(self, inputs: StepInputs) -> Exchanges:
        """See ``Transport``; all ranks with rows are those of the other tensor-parallel ranks too."""
        if self._exchanges is None:
            options = group_options(self._settings)
            pipeline, everyone = (
                collective_group(dist.get_process_group_ranks(ranks), self._settings.timeout, options=options)
                for ranks in (inputs.group, parallel_state.get_model_parallel_group())
            )
            self._exchanges = Exchanges(pipeline, everyone)
        return self._exchanges
