"""What features add to the estimates of steps."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs

if TYPE_CHECKING:
    from megatron_pp_ext.planner.step.estimate import Estimate
    from megatron_pp_ext.planner.step.workload import Workload


class Addition:
    """The part of a feature in estimates; this one adds nothing."""

    def costs(self, work: "Workload", costs: Costs) -> Costs:
        """Return the ``costs`` of the stages of ``work`` with what the feature's actions take."""
        return costs

    def in_step(self, work: "Workload", schedule: Schedule, costs: Costs) -> Costs:
        """Return the ``costs`` of a microbatch as those of the actions of ``schedule``."""
        return costs

    def activations(
        self, work: "Workload", schedule: Schedule, peaks: tuple[float, ...]
    ) -> tuple[float, ...]:
        """Return the most bytes of activations of each rank, which are ``peaks`` without the feature."""
        return peaks

    def completed(self, estimate: "Estimate", work: "Workload", schedule: Schedule) -> "Estimate":
        """Return the ``estimate`` of one step of ``schedule`` with what the feature knows of it."""
        return estimate

    def unmeasured(self, schedule: Schedule) -> Iterator[str]:
        """Yield what steps of ``schedule`` have and no published step had, in words (``error_band``)."""
        yield from ()

    def lines(self, estimate: "Estimate") -> Iterator[str]:
        """Yield what people should read of the ``estimate`` after the memory of its ranks."""
        yield from ()


def additions() -> list[Addition]:
    """Return the parts of all features that have one."""
    return list(filter(None, (feature.addition() for feature in FEATURES)))
