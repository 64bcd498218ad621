"""The costs of a step whose units differ: each microbatch has costs of its own for every stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from megatron_pp_ext.schedule.actions import Action
from megatron_pp_ext.schedule.costs import Costs


@dataclass(frozen=True, slots=True)
class UnitCosts(Costs):
    """Costs with ``units``, one for each microbatch of the schedule, in its order.

    ``stages`` and ``vocabulary`` are of a mean microbatch, by which memory is counted in microbatches;
    seconds and memory of an action are its microbatch's own.  Messages take ``hop``, and pairs ``pair``,
    whichever microbatches they are of.  ``tokens`` has the number for each microbatch.  ValueError for a unit
    with another number of stages, and for tokens of another number of microbatches.
    """

    units: tuple[Costs, ...] = ()
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        Costs.__post_init__(self)
        for number, unit in enumerate(self.units):
            if len(unit.stages) != len(self.stages):
                raise ValueError(
                    f"unit {number} has costs of {len(unit.stages)} stages, but there are "
                    f"{len(self.stages)}: give one StageCosts a stage"
                )
        if len(self.tokens) != len(self.units):
            raise ValueError(
                f"there are tokens of {len(self.tokens)} microbatches and costs of {len(self.units)}: give "
                "both for each"
            )

    @property
    def are_alike(self) -> bool:
        """Whether microbatches have no costs of their own."""
        return not self.units

    def seconds(self, action: Action) -> float:
        """Return how long ``action`` keeps its rank busy; ValueError for a microbatch without a unit."""
        return self._of(action).seconds(action)

    def growth(self, action: Action) -> float:
        """Return the memory that ``action`` takes at its start; its end frees what is not kept."""
        return self._of(action).growth(action)

    def kept(self, action: Action) -> float:
        """Return by how much more is kept after ``action`` than before; below 0, less."""
        return self._of(action).kept(action)

    def joined(self, counts: Sequence[int]) -> Self:
        """Return the costs of stages of ``counts`` of these each, for every unit; see ``Costs.joined``."""
        units = tuple(unit.joined(counts) for unit in self.units)
        return replace(self, stages=Costs(self.stages).joined(counts).stages, units=units)

    def ordered(self, order: Sequence[int]) -> Self:
        """Return the costs of the step whose microbatch k is ``order[k]`` of this one."""
        return replace(
            self,
            units=tuple(self.units[number] for number in order),
            tokens=tuple(self.tokens[number] for number in order),
        )

    def _of(self, action: Action) -> Costs:
        if not 0 <= action.microbatch < len(self.units):
            raise ValueError(
                f"{action} is of a microbatch without costs, there are {len(self.units)}: give one unit for "
                "each microbatch of the schedule"
            )
        return self.units[action.microbatch]
