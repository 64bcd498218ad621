"""Copies of activations to the host and back (``schedule.actions``), and their places in a plan."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations
from megatron_pp_ext.runtime.operations import Compute, Extension, Operation, RankOrder
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.split import Owner
from megatron_pp_ext.schedule.actions import Action, Kind, label


@dataclass(frozen=True, slots=True)
class OffloadCopy(Operation):
    """Launch the copy to the host of a forward's saved tensors."""

    owner: Owner

    def run(self, rank: Rank) -> None:
        rank.part(OffloadedActivations).offload(self.owner, rank.recorder.span(label("out", *self.owner)))


@dataclass(frozen=True, slots=True)
class Free(Operation):
    """Free the device memory of copied activations; later computation waits for the copy."""

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
class OffloadedForward:
    """The context of a forward whose activations are offloaded: it records the saved tensors."""

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
        """See ``Extension``: an offloaded forward records its saved tensors."""
        stage, kind, microbatch = work.action
        if kind is not Kind.F or (stage, microbatch) not in self._offloaded:
            return work
        return replace(work, around=(*work.around, OffloadedForward(Owner(stage, microbatch))))

    def before(self, actions: tuple[Action, ...]) -> Iterator[Operation]:
        first = actions[0]
        yield from (Free(Owner(*activation)) for activation in self._freed.get(first, ()))
        yield from (Reload(Owner(*activation)) for activation in self._back.get(first, ()))

    def after(self, works: Iterable[Compute]) -> Iterator[Operation]:
        for work in works:
            yield from (
                OffloadCopy(around.owner) for around in work.around if isinstance(around, OffloadedForward)
            )

    def at_end(self) -> Iterator[Operation]:
        if self._back:
            yield EndOffloading()
