"""Schedules: the order of the actions of every rank, and the needs of an action."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, Self

from megatron_pp_ext.schedule.action import Action, Kind
from megatron_pp_ext.schedule.copies import Copies
from megatron_pp_ext.schedule.placement import Placement

OF_STAGES = (Kind.F, Kind.I, Kind.W, Kind.B)
"""The work that a stage of the model does.  S and T are work of a rank."""


class UnitName(NamedTuple):
    """Which slice of which microbatch a unit is, where sequences go through the pipeline in slices."""

    microbatch: int
    slice: int

    def __str__(self) -> str:
        return f"{self.microbatch}.{self.slice}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """One training step of a pipeline as data: the actions of every rank in their order.

    ``orders[r]`` is the list of actions of rank r.  ``name`` is the catalogue's name and
    ``microbatches`` is m.  A schedule has no times: when an action starts follows from the order,
    the costs and the messages (``simulate``).

    ``paired`` are the forwards that run together with the backward (I or B) right after them in the order,
    layer by layer, so that each half computes while the other one communicates.  The two start and end
    together.  Everything that counts actions, activations or messages reads the order as it stands.

    ``copies`` move activations to the host and back; without any, all activations stay on the device.

    Where sequences are cut into slices, microbatches are *units*: a slice, or a pack of short sequences.
    ``units`` then has the name of each by its number, and is empty elsewhere.

    ``durations`` are planned times of units that differ much, in whole numbers (``launch_order.WORK``): those
    of F, I, W and B of each stage in turn, for each unit.  They decide where receives are posted, and no
    more.
    """

    name: str
    placement: Placement
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    paired: frozenset[Action] = frozenset()
    copies: Copies = field(default_factory=Copies)
    units: tuple[UnitName, ...] = ()
    durations: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @property
    def whole_microbatches(self) -> int:
        """The number of microbatches, of which units are parts."""
        return 1 + max(unit.microbatch for unit in self.units) if self.units else self.microbatches

    @property
    def share(self) -> float:
        """The part of a microbatch that a unit is on average."""
        return self.whole_microbatches / self.microbatches

    def unit_name(self, microbatch: int) -> str:
        """Return the name of the unit of this number: ``3``, or ``3.1`` for slice 1 of microbatch 3."""
        return str(self.units[microbatch] if self.units else microbatch)

    @property
    def ranks(self) -> int:
        """The pipeline-parallel size p."""
        return self.placement.ranks

    @property
    def splits_backward(self) -> bool:
        """Whether any backward comes in two halves, so that weight gradients must be deferrable."""
        return any(action.kind is Kind.W for order in self.orders for action in order)

    @property
    def with_halved_backwards(self) -> Self:
        """The same schedule with every whole backward as its two halves, one right after the other."""
        orders = (
            chain.from_iterable(
                (action._replace(kind=Kind.I), action._replace(kind=Kind.W))
                if action.kind is Kind.B
                else (action,)
                for action in order
            )
            for order in self.orders
        )
        copies = self.copies.with_actions(
            lambda action: action._replace(kind=Kind.I) if action.kind is Kind.B else action
        )
        return replace(self, orders=tuple(map(tuple, orders)), copies=copies)

    @property
    def turned_over(self) -> Self:
        """The same schedule with the ranks counted from the other end; ValueError unless the placement folds.

        Stages keep their numbers, and so do S and T, which carry the number of their rank's first stage.
        """
        return replace(self, placement=self.placement.turned_over, orders=self.orders[::-1])

    @property
    def digest(self) -> str:
        """A hash of all but name and microbatches: equal on two ranks when they run the same schedule."""
        text = "\n".join(",".join(map(str, order)) for order in self.orders)
        if self.paired:
            text += "\npairs " + ",".join(map(str, sorted(self.paired)))
        if self.copies:
            text += f"\ncopies {self.copies}"
        if self.units:
            text += "\nunits " + ",".join(map(str, self.units))
        if self.durations:
            text += f"\ndurations {self.durations}"
        placement = self.placement
        shape = f"{placement.shape}/{placement.ranks}/{placement.chunks}" + "/shared" * placement.splits_head
        shape += "/ends on last" * placement.ends_on_last
        return hashlib.sha256(f"{shape}\n{text}".encode()).hexdigest()

    def __iter__(self) -> Iterator[Action]:
        """Yield all actions, rank after rank."""
        for order in self.orders:
            yield from order


def needs(action: Action, placement: Placement) -> tuple[Action, ...]:
    """Return the actions whose end ``action`` waits for.

    A backward may be whole (B) or in halves (I, W), and both an I and a B of the next stage deliver the
    gradient.  A dependency on a backward is returned as I, and the caller accepts B in its place
    (``delivers``).
    """
    stage, kind, microbatch = action
    if kind is Kind.F:
        return (Action(stage - 1, Kind.F, microbatch),) if stage > 0 else ()
    if kind is Kind.W:
        return (Action(stage, Kind.I, microbatch),)
    last = placement.stages - 1
    if kind is Kind.S:
        return (Action(last, Kind.F, microbatch),)
    if kind is Kind.T:
        return Action(stage, Kind.S, microbatch), Action(last, Kind.I, microbatch)
    own_forward = Action(stage, Kind.F, microbatch)
    if stage < last:
        return own_forward, Action(stage + 1, Kind.I, microbatch)
    if placement.splits_head:
        return own_forward, *(Action(first, Kind.S, microbatch) for first in range(placement.ranks))
    return (own_forward,)


def together(order: Sequence[Action], paired: frozenset[Action]) -> Iterator[tuple[Action, ...]]:
    """Yield the actions of one rank's ``order``, the two of a pair as one tuple."""
    position = 0
    while position < len(order):
        end = position + 1 + (order[position] in paired)
        yield tuple(order[position:end])
        position = end


def delivers(action: Action) -> Action:
    """Return the name that ``needs`` uses for ``action``: a whole backward stands for its I half."""
    return Action(action.stage, Kind.I, action.microbatch) if action.kind is Kind.B else action
