"""The protocol of every operation."""

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.profiler import record_function

from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule.actions import Action


def in_profile(name: str) -> AbstractContextManager[object]:
    """Return a context that torch's profiler shows under ``name``; it does nothing while none is running."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


class Operation(Protocol):
    """One piece of a rank's work.

    Operations hand tensors to each other through ``Rank.tensors`` and keep nothing themselves, so that the
    same plan runs in every step.
    """

    def run(self, rank: Rank) -> None:
        """Do the work."""


@dataclass(frozen=True, slots=True)
class Recorded(Operation):
    """An action of the schedule, whose computation is reported to the recorder."""

    action: Action

    def run(self, rank: Rank) -> None:
        with in_profile(str(self.action)), rank.recorder.during(self.action):
            self.perform(rank)

    @abstractmethod
    def perform(self, rank: Rank) -> None:
        """Do the work that is recorded."""
