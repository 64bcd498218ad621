"""The transport of messages and collectives between the ranks of a pipeline."""

from typing import Protocol

import torch.distributed as dist

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


class Transport(Protocol):
    """Connects this rank with the others of its pipeline, or is their stub where it ``is_alone``."""

    is_alone: bool

    def channels(self, inputs: StepInputs) -> Channels:
        """Return the channels of one step."""

    def groups(self, feature: str, *like: dist.ProcessGroup) -> tuple[dist.ProcessGroup, ...]:
        """Return groups that carry only the collectives of ``feature``, each among the ranks of one ``like``.

        The first call for a feature makes them: it is collective over the whole world, at a time when no
        message is on its way.
        """


class ProcessGroups:
    """Messages over process groups of their own, which the first call makes; a ``Transport``.

    That call is collective over the whole world, at a time when no message is on its way.
    """

    is_alone = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._directions: Directions | None = None
        self._groups: dict[str, tuple[dist.ProcessGroup, ...]] = {}
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

    def groups(self, feature: str, *like: dist.ProcessGroup) -> tuple[dist.ProcessGroup, ...]:
        if feature not in self._groups:
            options, timeout = group_options(self._settings), self._settings.timeout
            self._groups[feature] = tuple(
                collective_group(dist.get_process_group_ranks(group), feature, timeout, options=options)
                for group in like
            )
        return self._groups[feature]
