"""Copies of activations to the host and back (``schedule.copies``, ``runtime.activations_away``)."""

from dataclasses import dataclass

from megatron_pp_ext.runtime.activation_meter import Owner
from megatron_pp_ext.runtime.operations.operation import Operation
from megatron_pp_ext.runtime.rank import Rank


@dataclass(frozen=True, slots=True)
class ToHost(Operation):
    """Launch the copy to the host of what a forward has saved."""

    owner: Owner

    def run(self, rank: Rank) -> None:
        """See ``Operation``."""
        rank.activations_away.send(self.owner, rank.recorder.copying("out", self.owner))


@dataclass(frozen=True, slots=True)
class GiveUp(Operation):
    """Give up the device's memory of what was copied; what is computed next waits for that copy."""

    owner: Owner

    def run(self, rank: Rank) -> None:
        """See ``Operation``."""
        rank.activations_away.give_up(self.owner)


@dataclass(frozen=True, slots=True)
class ToDevice(Operation):
    """Launch the copy back to the device; the backward alone waits for it."""

    owner: Owner

    def run(self, rank: Rank) -> None:
        """See ``Operation``."""
        rank.activations_away.bring_back(self.owner, rank.recorder.copying("back", self.owner))


@dataclass(frozen=True, slots=True)
class AllBack(Operation):
    """End the step: nothing is left on the host."""

    def run(self, rank: Rank) -> None:
        """See ``Operation``."""
        rank.activations_away.close()
