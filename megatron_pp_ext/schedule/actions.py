"""Schedules: the order of the actions of every rank, and what an action waits for."""

import hashlib
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import Literal, NamedTuple, Self

from megatron_pp_ext.schedule.placement import Placement


class Kind(StrEnum):
    """The work of a stage on a microbatch.

    F, I, W and B are torch.distributed.pipelining's letters, so that this project, torch and torchtitan can
    exchange schedules as files (``formats.csv_file``).  S and T are for a head that is split over the ranks
    (``Placement.splits_head``).
    """

    F = "F"
    """Forward."""
    I = "I"
    """Input-gradient half of the backward; the papers call it B."""
    W = "W"
    """Weight-gradient half of the backward."""
    B = "B"
    """The whole backward, both halves in one."""
    S = "S"
    """A rank's part of the logits, with its part of their softmax and of the hidden state's gradient."""
    T = "T"
    """The weight gradient of a rank's part of the output layer."""


class Action(NamedTuple):
    """Work of one ``kind`` by ``stage`` on ``microbatch``; ``3F0`` is stage 3, forward, microbatch 0.

    S and T have the number of their rank's first stage, which is the rank's own number unless the placement
    has the embedding and the head on the last rank.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Label(NamedTuple):
    """A span's description: its ``category``, which a feature chooses, its ``name``, and more ``about`` it.

    Spans with a ``track`` are shown in a row of that name, where none overlaps another of its rank.  Others
    are shown with the actions, which they may overlap.
    """

    category: str
    name: str
    track: str = ""
    about: tuple[tuple[str, int | str], ...] = ()


class Span(NamedTuple):
    """The work that ``label`` describes, from ``start`` to ``end``, in seconds."""

    label: Label
    start: float
    end: float


type Way = Literal["out", "back"]
"""A copy to the host, or one back."""

WAYS: dict[Way, str] = {"out": "to the host", "back": "from the host"}
"""In words for people."""

type Kept = tuple[int, int]
"""The activations of a stage and a microbatch."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Which activations are offloaded, and before which action of their rank each of them is reloaded.

    ``reloads`` has what is offloaded: (stage, microbatch) -> an action of the same rank.  The copy to the
    host is launched right after the F of that stage and microbatch, and waits for its end.  The copy back is
    launched before the action: it waits for the end of the action before that one and of the copy to the
    host, and the first backward (I or B) waits for it.  The action comes after the F, and it is this backward
    at the latest.  A pair is one launch, so that the action is never the second one of a pair.

    ``frees`` has the action of the same rank before which the memory on the device is freed, after the F and
    at the latest where the copy back is launched; ``freed_before`` chooses the place for those without one.

    A rank has a copy engine each way, which does one copy after the other at the same time as its actions.
    """

    reloads: Mapping[Kept, Action] = field(default_factory=dict, hash=False)
    frees: Mapping[Kept, Action] = field(default_factory=dict, hash=False)

    def __bool__(self) -> bool:
        return bool(self.reloads)

    def __str__(self) -> str:
        """All copies as text, in an order that does not depend on that of ``reloads``."""
        return ",".join(
            f"{unit[0]}.{unit[1]}-{self.frees.get(unit, '')}@{self.reloads[unit]}"
            for unit in sorted(self.reloads)
        )

    def with_actions(self, change: Callable[[Action], Action]) -> Self:
        """Return the same copies at the actions that ``change`` makes of those here."""
        reloads, frees = (
            {unit: change(action) for unit, action in actions.items()}
            for actions in (self.reloads, self.frees)
        )
        return replace(self, reloads=reloads, frees=frees)

    def reloaded_before(self, order: Iterable[Action]) -> dict[Action, list[Kept]]:
        """Return the copies back of a rank with this ``order``, by the action before which they are launched.

        Those before one action are launched in the order of the backwards that wait for them.
        """
        units: dict[Action, list[Kept]] = {}
        for stage, kind, microbatch in order:
            if kind in ("I", "B") and (action := self.reloads.get((stage, microbatch))):
                units.setdefault(action, []).append((stage, microbatch))
        return units

    def freed_before(self, launches: Sequence[Sequence[Action]]) -> dict[Action, list[Kept]]:
        """Return whose memory on the device is freed, by the action of a rank before which it is.

        ``launches`` are the rank's actions in its order, the two of a pair together.  What is computed next
        waits for the copy to the host, so that the memory is free for it, however far the host runs ahead of
        the device.  Where ``frees`` has nothing, the copy runs during at least one launch; the next launch
        after that which takes memory, a forward or a copy back, waits for it, and so does its copy back.
        """
        places = {action: place for place, actions in enumerate(launches) for action in actions}
        reloading = set(self.reloads.values())
        takers = [
            place
            for place, actions in enumerate(launches)
            if actions[0] in reloading or any(action.kind == "F" for action in actions)
        ]
        units: dict[Action, list[Kept]] = {}
        for action, place in places.items():
            unit = action.stage, action.microbatch
            if action.kind == "F" and unit in self.reloads:
                later = takers[bisect(takers, place + 1) :][:1]
                if unit in self.frees:
                    later = [places[self.frees[unit]]]
                before = min([*later, places[self.reloads[unit]]])
                units.setdefault(launches[before][0], []).append(unit)
        return units


def label(way: Way, stage: int, microbatch: int) -> Label:
    """Return the label in a trace of a copy of the activations of ``stage`` and ``microbatch``."""
    words = WAYS[way]
    about = ("stage", stage), ("microbatch", microbatch), ("way", way)
    return Label("copy", f"{stage}.{microbatch} {words}", f"copies {words}", about)


OF_STAGES = (Kind.F, Kind.I, Kind.W, Kind.B)
"""The work that a stage of the model does.  S and T are work of a rank."""


class UnitName(NamedTuple):
    """Which slice of which microbatch a unit is, where sequences go through the pipeline in slices.

    It has the tokens from ``begin`` to ``end`` of its sequence; a pack of several begins at 0.
    """

    microbatch: int
    slice: int
    begin: int = 0
    end: int = 1

    def __str__(self) -> str:
        return f"{self.microbatch}.{self.slice}"


@dataclass(frozen=True, slots=True, repr=False)
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
    durations: tuple[tuple[int, ...], ...] = ()

    def __repr__(self) -> str:
        sizes = f"{self.ranks} ranks, {self.whole_microbatches} microbatches"
        return f"<Schedule {self.name}: {sizes}, {sum(map(len, self.orders))} actions>"

    @property
    def whole_microbatches(self) -> int:
        """The number of microbatches, of which units are parts."""
        return 1 + max(unit.microbatch for unit in self.units) if self.units else self.microbatches

    @property
    def share(self) -> float:
        """The part of a microbatch that a unit is on average."""
        return self.whole_microbatches / self.microbatches

    @property
    def largest_share(self) -> float:
        """The part of a microbatch that the largest unit is at most."""
        if not self.units:
            return 1.0
        sizes = [unit.end - unit.begin for unit in self.units]
        return max(sizes) * self.whole_microbatches / sum(sizes)

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
            text += "\nunits " + ",".join(f"{unit}:{unit.begin}-{unit.end}" for unit in self.units)
        if self.durations:
            text += f"\ndurations {self.durations}"
        placement = self.placement
        shape = f"{placement.shape}/{placement.ranks}/{placement.chunks}" + "/shared" * placement.splits_head
        shape += "/ends on last" * placement.ends_on_last
        return hashlib.sha256(f"{shape}\n{text}".encode()).hexdigest()

    def __iter__(self) -> Iterator[Action]:
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


RankOf = Callable[[int, int], int]
"""The rank that runs a stage for a microbatch."""


class Announced(StrEnum):
    """The activations that announce their shapes, where shapes are not known before the step.

    Gradients announce none: they have the shapes of their activations.
    """

    NOTHING = "nothing"
    """All shapes are known."""
    FIRST = "first"
    """The first one of each microbatch that a rank gets; all others of the microbatch have this shape."""
    EVERY = "every"
    """Stages may change the shape."""


@dataclass(frozen=True, slots=True)
class Orders:
    """The order of every rank in a part of a run: a whole step, or one whose messages cross its ends.

    ``by_rank[r]`` are the actions of rank r, of the stages in ``placement``.  ``paired``, ``copies`` and
    ``durations`` are those of a ``Schedule``, ``announced`` the messages that announce their shapes.  Where
    stages have replicas, ``replica_of`` is the rank that runs a stage for a microbatch.
    """

    by_rank: Sequence[Sequence[Action]]
    placement: Placement
    paired: frozenset[Action] = frozenset()
    copies: Copies = field(default_factory=Copies)
    durations: Sequence[Sequence[int]] = ()
    announced: Announced = Announced.NOTHING
    replica_of: RankOf | None = None

    @classmethod
    def of(cls, schedule: Schedule, announced: Announced = Announced.NOTHING) -> Self:
        """Return the orders of ``schedule``."""
        return cls(
            schedule.orders,
            schedule.placement,
            schedule.paired,
            schedule.copies,
            schedule.durations,
            announced,
        )

    @property
    def stages(self) -> int:
        return self.placement.stages

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs ``stage`` for ``microbatch``."""
        if self.replica_of is not None:
            return self.replica_of(stage, microbatch)
        return self.placement.rank_of(stage)

    def is_announced(self, stage: int, microbatch: int) -> bool:
        """Whether the input of ``stage`` announces its shape, if it comes from another rank."""
        if self.announced is not Announced.FIRST:
            return self.announced is Announced.EVERY
        rank = self.rank_of(stage, microbatch)
        return all(self.rank_of(before, microbatch) != rank for before in range(stage))

    def is_repeated(self, stage: int, microbatch: int) -> bool:
        """Whether the input of ``stage`` has a shape that was announced to its rank."""
        return self.announced is Announced.FIRST and not self.is_announced(stage, microbatch)
