"""Copies of activations to the host and back (``schedule.copies``), and their places in a plan."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations
from megatron_pp_ext.runtime.activation_meter import Owner
from megatron_pp_ext.runtime.extension import Extension, RankOrder
from megatron_pp_ext.runtime.operations.compute import Compute
from megatron_pp_ext.runtime.operations.operation import Operation
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.copies import label


@dataclass(frozen=True, slots=True)
class Offload(Operation):
    """Launch the copy to the host of what a forward has saved."""

    owner: Owner

    def run(self, rank: Rank) -> None:
        rank.part(OffloadedActivations).offload(self.owner, rank.recorder.span(label("out", *self.owner)))


@dataclass(frozen=True, slots=True)
class Free(Operation):
    """Free the device's memory of what was copied; what is computed next waits for that copy."""

    owner: Owner

    def run(self, rank: Rank) -> None:
        rank.part(OffloadedActivations).free(self.owner)


@dataclass(frozen=True, slots=True)
class Reload(Operation):
    """Launch the copy back to the device; the backward alone waits for it."""

    owner: Owner

    def run(self, rank: Rank) -> None:
        rank.part(OffloadedActivations).reload(self.owner, rank.recorder.span(label("back", *self.owner)))


@dataclass(frozen=True, slots=True)
class EndOffloading(Operation):
    """End the step: nothing is left on the host."""

    def run(self, rank: Rank) -> None:
        rank.part(OffloadedActivations).close()


@dataclass(frozen=True, slots=True)
class Saving:
    """The context of a forward whose activations are offloaded: takes note of what it saves."""

    owner: Owner

    def __call__(self, rank: Rank) -> AbstractContextManager[None]:
        return rank.part(OffloadedActivations).saving(self.owner)


class CopiesOfRank(Extension):
    """The copies of one rank.

    Memory is freed and copies back are launched before the receives of an action, which they do not wait for.
    """

    def __init__(self, order: RankOrder) -> None:
        self._offloaded = frozenset(order.copies.reloads)
        self._freed = order.copies.freed_before(list(order.steps))
        self._back = order.copies.reloaded_before(order.order)

    def extended(self, work: Compute) -> Compute:
        """See ``Extension``: the forward of what is offloaded takes note of what it saves."""
        stage, kind, microbatch = work.action
        if kind is not Kind.F or (stage, microbatch) not in self._offloaded:
            return work
        return replace(work, around=(*work.around, Saving(Owner(stage, microbatch))))

    def before(self, actions: tuple[Action, ...]) -> Iterator[Operation]:
        first = actions[0]
        yield from (Free(Owner(*kept)) for kept in self._freed.get(first, ()))
        yield from (Reload(Owner(*kept)) for kept in self._back.get(first, ()))

    def after(self, works: Iterable[Compute]) -> Iterator[Operation]:
        for work in works:
            yield from (Offload(around.owner) for around in work.around if isinstance(around, Saving))

    def at_end(self) -> Iterator[Operation]:
        if self._back:
            yield EndOffloading()
