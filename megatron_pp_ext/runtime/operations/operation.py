"""What every operation can do."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule.actions import Action


class Operation(Protocol):
    """One piece of a rank's work.

    Operations hand tensors to each other through ``Rank.tensors`` and keep nothing themselves, so that the
    same plan runs in every step.
    """

    def run(self, rank: Rank) -> None:
        """Do the work."""


@dataclass(frozen=True, slots=True)
class Recorded(Operation):
    """An action of the schedule, whose computation the recorder is told of."""

    action: Action

    def run(self, rank: Rank) -> None:
        """See ``Operation``."""
        with rank.recorder.during(self.action):
            self.perform(rank)

    @abstractmethod
    def perform(self, rank: Rank) -> None:
        """Do the work that is recorded."""
