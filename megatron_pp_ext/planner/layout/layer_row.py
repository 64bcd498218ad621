"""A row of layers that were measured one by one, or of which the stages were."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import fsum

from megatron_pp_ext.planner.layout.cut import Cut, bounds
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import Placement

type Seconds = tuple[float, float, float]
"""The seconds of F, I and W."""

NOTHING: Seconds = (0.0, 0.0, 0.0)


def seconds_of(costs: StageCosts) -> Seconds:
    """Return the seconds of F, I and W in ``costs``."""
    return costs.forward, costs.input_gradient, costs.weight_gradient


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Layers whose seconds add up, for stages that have the fewest layers in ``least``.

    ``front`` and ``back`` are what the first and the last stage take beside their layers.  ``like`` has the
    times of messages.  ``totals`` returns the bytes that every rank needs under a cut.
    """

    layers: tuple[Seconds, ...]
    front: Seconds
    back: Seconds
    like: Costs
    placement: Placement
    least: Cut
    totals: Callable[[Cut], Sequence[float]]

    @property
    def items(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def seconds(self, stage: int, first: int, end: int) -> Seconds:
        """Return the seconds of F, I and W of ``stage`` if it has the layers first, ..., end - 1."""
        parts = [*self.layers[first:end]]
        parts += [self.front] if stage == 0 else []
        parts += [self.back] if stage == self.placement.stages - 1 else []
        forward, input_gradient, weight_gradient = map(fsum, zip(NOTHING, *parts, strict=True))
        return forward, input_gradient, weight_gradient

    def costs(self, cut: Cut) -> Costs:
        """Return the costs of the stages of ``cut``, whose activations are left out."""
        stages = tuple(StageCosts(*self.seconds(*where), activation=0.0) for where in bounds(cut))
        return replace(self.like, stages=stages)
