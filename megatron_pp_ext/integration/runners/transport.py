"""What carries messages and exchanges between the ranks of a pipeline."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_pp_ext.integration.runners.message_groups import (
    Directions,
    message_channels,
    message_groups,
    vocabulary_exchanges,
)
from megatron_pp_ext.integration.settings import Settings
from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.vocabulary_exchanges import Exchanges


class Transport(Protocol):
    """Connects this rank with the others of its pipeline, or stands in for them.

    With ``hides_exchanges`` the two actions of a pair run together; else one after the other.
    """

    hides_exchanges: bool

    def channels(self, group: dist.ProcessGroup, shape: Any, config: Any) -> Channels:
        """Return the channels of one step for messages of ``shape`` in the pipeline ``group``."""

    def exchanges(self, group: dist.ProcessGroup, model: Sequence[torch.nn.Module]) -> Exchanges:
        """Return the exchanges of the vocabulary of ``model``, which the pipeline ``group`` shares."""


class ProcessGroups:
    """Messages over process groups of their own, which the first call makes; a ``Transport``."""

    hides_exchanges = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._directions: Directions | None = None
        self._exchanges: Exchanges | None = None

    def directions(self, group: dist.ProcessGroup) -> Directions:
        """Return the process groups, down and up, of the messages in ``group``."""
        if self._directions is None:
            self._directions = message_groups(self._settings, dist.get_process_group_ranks(group))
        return self._directions

    def channels(self, group: dist.ProcessGroup, shape: Any, config: Any) -> Channels:
        """See ``Transport``."""
        return message_channels(dist.get_process_group_ranks(group), self.directions(group), shape, config)

    def exchanges(self, group: dist.ProcessGroup, model: Sequence[torch.nn.Module]) -> Exchanges:
        """See ``Transport``."""
        if self._exchanges is None:
            self._exchanges = vocabulary_exchanges(self._settings, group)
        return self._exchanges
