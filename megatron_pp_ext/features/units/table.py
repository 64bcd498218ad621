"""What units take and keep: one table, by the kind of work, the stage and the unit."""

import math
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.features.units.rates import LEAST, LengthCosts
from megatron_pp_ext.schedule.actions import OF_STAGES
from megatron_pp_ext.schedule.costs import Costs, UnitCosts
from megatron_pp_ext.schedule.launch_order import WORK
from megatron_pp_ext.schedule.program import KINDS, B, F, I, S, T, W

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

COPY, NOTHING = range(len(KINDS), len(KINDS) + 2)
"""The codes of a copy of activations to the host, and of no work, after those of ``schedule.program``."""

type Durations = tuple[tuple[int, ...], ...]
"""The times of units as ``Schedule.durations`` has them."""


class Lengths(Protocol):
    """The lengths of a step: its microbatches (``Microbatches``), or units of them (``Units``)."""

    @property
    def documents(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def squares(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...


class Table(NamedTuple):
    """The time and memory of work: ``seconds[kind, stage, unit]`` and ``kept[kind, stage, unit]``.

    Kinds are the codes of ``schedule.program``, ``COPY`` and ``NOTHING``.  S and T are the same for all
    stages.  ``kept`` is above 0 for what is kept from the start on, and below 0 for what the end gives back,
    in the unit of ``StageCosts.activation``.  ``delays`` are the seconds on each wire (``program.WIRES``),
    and ``pair`` is what a pair takes (``Costs.pair``).
    """

    seconds: Floats
    kept: Floats
    delays: Floats
    pair: float

    @property
    def work(self) -> Floats:
        """The seconds that all stages together work on each unit, where backwards are whole."""
        return self.seconds[[F, B]].sum(axis=(0, 1))

    @property
    def is_of_alike(self) -> bool:
        """Whether all units take equally long."""
        return bool((self.seconds == self.seconds[:, :, :1]).all())

    @property
    def by_row(self) -> "Table":
        """The same with a row ``kind * stages + stage`` in the place of both, as loops read it."""
        units = self.seconds.shape[2]
        return self._replace(seconds=self.seconds.reshape(-1, units), kept=self.kept.reshape(-1, units))

    def durations(self, order: Integers) -> Durations:
        """Return the times of units in this ``order``, by which ranks launch."""
        seconds = self.seconds[: len(OF_STAGES)][:, :, order]
        scale = WORK[OF_STAGES[F]] * seconds[F].size / math.fsum(seconds[F].flat)
        whole = np.maximum(1, np.rint(scale * seconds)).astype(np.int64)
        return tuple(map(tuple, whole.T.reshape(len(order), -1).tolist()))


def table_of(costs: Costs, count: int = 0) -> Table:
    """Return the table of the units of ``costs``; of ``count`` units where all have the same costs."""
    units = costs.units if isinstance(costs, UnitCosts) else (costs,) * count
    distinct = {id(unit): unit for unit in units}
    seconds = np.zeros((NOTHING + 1, len(costs.stages), len(distinct)))
    kept = np.zeros_like(seconds)
    for number, unit in enumerate(distinct.values()):
        for code, kind in enumerate(OF_STAGES):
            seconds[code, :, number] = [stage.seconds(kind) for stage in unit.stages]
            kept[code, :, number] = [stage.kept(kind) for stage in unit.stages]
        seconds[COPY, :, number] = [stage.copy for stage in unit.stages]
        if unit.head is not None:
            seconds[S, :, number], seconds[T, :, number] = unit.head.scores, unit.head.weight_gradient
            kept[S, :, number], kept[T, :, number] = unit.head.activation, -unit.head.activation
    numbers = {key: number for number, key in enumerate(distinct)}
    each = np.array([numbers[id(unit)] for unit in units])
    return Table(seconds.take(each, 2), kept.take(each, 2), _delays(costs), costs.pair)


def table_by_length(rates: LengthCosts, lengths: Lengths, overhead: float = 0.0) -> Table:
    """Return the table of ``rates.of(lengths, overhead)``, without its objects for each unit."""
    tokens, squares = np.array(lengths.tokens, float), np.array(lengths.squares, float)
    counted = tokens + overhead
    per_token, per_square = (
        np.array([getattr(stage, name) for stage in rates.stages]).T[:, :, None]
        for name in ("per_token", "per_square")
    )
    activation, released, copy, hidden = (
        np.array([getattr(stage, name) for stage in rates.stages])[:, None]
        for name in ("activation", "released", "copy", "hidden")
    )
    seconds = np.zeros((NOTHING + 1, len(rates.stages), len(tokens)))
    kept = np.zeros_like(seconds)
    alone = per_token * counted + per_square * squares
    alone = np.maximum(alone, LEAST * alone.sum(axis=0))
    seconds[[F, I, W]] = alone
    within_whole = np.minimum(np.minimum(hidden * counted, alone[2]), (1 - LEAST) * alone[1])
    seconds[B] = alone[1] + alone[2] - within_whole
    seconds[COPY] = copy * tokens
    kept[F], kept[I] = activation * tokens, -released * tokens
    kept[W], kept[B] = -kept[I] - kept[F], -kept[F]
    if rates.head is not None:
        seconds[S], seconds[T] = rates.head.scores * tokens, rates.head.weight_gradient * tokens
        kept[S] = rates.head.activation * tokens
        kept[T] = -kept[S]
    delays = _delays(rates)
    delays[0] *= len(lengths.documents) / len(lengths)
    return Table(seconds, kept, delays, rates.pair)


def _delays(costs: Costs | LengthCosts) -> Floats:
    head = costs.head
    return np.array([costs.hop, head.hidden if head else 0.0, head.sums if head else 0.0, 0.0])
