"""A row of layers that were measured one by one, or of which the stages were."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from math import fsum

from megatron_pp_ext.planner.layout.cut import Cut, bounds
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.simulate import simulate

type Numbers = tuple[float, ...]
"""What ``StageCosts`` has: seconds of F, I and W, the activation, and what an I gives back of it."""

NOTHING: Numbers = (0.0,) * 5


def numbers(costs: StageCosts) -> Numbers:
    """Return what ``costs`` has as numbers that can be added."""
    return astuple(costs)


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Layers whose costs add up, for the stages of ``schedule``.

    ``front`` and ``back`` are what the first and the last stage have beside their layers.  ``like`` has all
    other costs.  Bytes are those of activations and messages.
    """

    layers: tuple[Numbers, ...]
    front: Numbers
    back: Numbers
    like: Costs
    schedule: Schedule
    least: Cut

    @property
    def items(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def seconds(self, stage: int, first: int, end: int) -> tuple[float, float, float]:
        """Return the seconds of F, I and W of ``stage`` if it has the layers first, ..., end - 1."""
        forward, input_gradient, weight_gradient, *_ = self._sum(stage, first, end)
        return forward, input_gradient, weight_gradient

    def costs(self, cut: Cut) -> Costs:
        """Return the costs of the stages of ``cut``."""
        return replace(self.like, stages=tuple(StageCosts(*self._sum(*where)) for where in bounds(cut)))

    def totals(self, cut: Cut) -> Sequence[float]:
        """Return the bytes of activations and messages that every rank keeps."""
        return simulate(self.schedule, self.costs(cut)).peak_memory

    def _sum(self, stage: int, first: int, end: int) -> Numbers:
        parts = [*self.layers[first:end]]
        parts += [self.front] if stage == 0 else []
        parts += [self.back] if stage == self.schedule.placement.stages - 1 else []
        return tuple(map(fsum, zip(NOTHING, *parts, strict=True)))
