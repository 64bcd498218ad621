"""Schedules and the actions that they consist of.

A schedule is the order of actions of every rank.  An action is one letter of work on one microbatch
by one stage.  The letters are those of torch.distributed.pipelining, so that this project, torch and
torchtitan can exchange schedules as files (see ``csv_file``).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import NamedTuple, Self

from megatron_pp_ext.schedule.placement import Placement


class Kind(StrEnum):
    """The work of a stage on a microbatch."""

    F = "F"
    """Forward."""
    I = "I"
    """Input-gradient half of the backward; the papers call it B."""
    W = "W"
    """Weight-gradient half of the backward."""
    B = "B"
    """The whole backward, both halves in one."""


class Action(NamedTuple):
    """Work of one ``kind`` by ``stage`` on ``microbatch``; ``3F0`` is stage 3, forward, microbatch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """One training step of a pipeline as data: the actions of every rank in their order.

    ``orders[r]`` is the list of actions of rank r.  ``name`` is the catalogue's name and
    ``microbatches`` is m.  A schedule has no times: when an action starts follows from the order,
    the costs and the messages (``simulate``).
    """

    name: str
    placement: Placement
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]

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
        return replace(self, orders=tuple(map(tuple, orders)))

    @property
    def digest(self) -> str:
        """A hash of placement and orders: equal on two ranks exactly when they run the same schedule."""
        text = "\n".join(",".join(map(str, order)) for order in self.orders)
        shape = self.placement
        return hashlib.sha256(f"{shape.shape}/{shape.ranks}/{shape.chunks}\n{text}".encode()).hexdigest()

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
    own_forward = Action(stage, Kind.F, microbatch)
    if stage == placement.stages - 1:
        return (own_forward,)
    return own_forward, Action(stage + 1, Kind.I, microbatch)


def delivers(action: Action) -> Action:
    """Return the name that ``needs`` uses for ``action``: a whole backward stands for its I half."""
    return Action(action.stage, Kind.I, action.microbatch) if action.kind is Kind.B else action
