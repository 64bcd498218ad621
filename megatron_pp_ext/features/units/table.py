"""What units take and keep: one table, by the kind of work, the stage and the unit."""

import math
from dataclasses import astuple
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.features.units.microbatches import UnitSizes
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
    @property
    def sizes(self) -> tuple[UnitSizes, ...]: ...
    def __len__(self) -> int: ...


class Table(NamedTuple):
    """The time and memory of work: ``seconds``, ``kept`` and ``taken[kind, stage, unit]``.

    Kinds are the codes of ``schedule.program``, ``COPY`` and ``NOTHING``.  S and T are the same for all
    stages.  ``taken`` is the memory that work has from its start on, and ``kept`` by how much more there is
    after it than before, in the unit of ``StageCosts.activation``.  ``owed[stage, unit]`` is the part of it
    that a backward takes for all slices of its sequence, until the I of the first one.  ``delays`` are the
    seconds on each wire (``program.WIRES``), and ``pair`` is what a pair takes (``Costs.pair``).
    """

    seconds: Floats
    kept: Floats
    taken: Floats
    owed: Floats
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
        seconds, kept, taken = (each.reshape(-1, units) for each in (self.seconds, self.kept, self.taken))
        return self._replace(seconds=seconds, kept=kept, taken=taken)

    def durations(self, order: Integers) -> Durations:
        """Return the times of units in this ``order``, by which ranks launch."""
        seconds = self.seconds[: len(OF_STAGES)][:, :, order]
        scale = WORK[OF_STAGES[F]] * seconds[F].size / math.fsum(seconds[F].flat)
        whole = np.maximum(1, np.rint(scale * seconds)).astype(np.int64)
        return tuple(map(tuple, whole.T.reshape(len(order), -1).tolist()))


def table_of(costs: Costs, count: int = 0) -> Table:
    """Return the table of the units of ``costs``; of ``count`` units where all have the same costs."""
    units = costs.units if isinstance(costs, UnitCosts) else (costs,) * count
    shared = costs.shared if isinstance(costs, UnitCosts) else ()
    distinct = {id(unit): unit for unit in units}
    seconds = np.zeros((NOTHING + 1, len(costs.stages), len(distinct)))
    kept, taken = np.zeros_like(seconds), np.zeros_like(seconds)
    for number, unit in enumerate(distinct.values()):
        for code, kind in enumerate(OF_STAGES):
            seconds[code, :, number] = [stage.seconds(kind) for stage in unit.stages]
            kept[code, :, number] = [stage.kept(kind) for stage in unit.stages]
            taken[code, :, number] = [stage.growth(kind) for stage in unit.stages]
        seconds[COPY, :, number] = [stage.copy for stage in unit.stages]
        if unit.head is not None:
            seconds[S, :, number], seconds[T, :, number] = unit.head.scores, unit.head.weight_gradient
            kept[S, :, number], kept[T, :, number] = unit.head.activation, -unit.head.activation
            taken[S, :, number] = unit.head.activation
    numbers = {key: number for number, key in enumerate(distinct)}
    each = np.array([numbers[id(unit)] for unit in units])
    seconds, kept, taken = (column.take(each, 2) for column in (seconds, kept, taken))
    stored, owed, returned = np.array(shared or np.zeros((len(units), len(costs.stages), 3))).T
    return _with_shared(Table(seconds, kept, taken, owed, _delays(costs), costs.pair), stored, returned)


def _with_shared(table: Table, stored: Floats, returned: Floats) -> Table:
    """Add what F have ``stored`` for all slices, I have ``owed``, and their ends have ``returned``."""
    for array in (table.kept, table.taken):
        array[F] += stored
        array[[I, B]] += table.owed
    table.kept[[I, B]] -= returned
    return table


def table_by_length(rates: LengthCosts, lengths: Lengths, overhead: float = 0.0) -> Table:
    """Return the table of ``rates.of(lengths, overhead)``, without its objects for each unit."""
    tokens, squares, scores, end, stored, owes, owed = np.array(lengths.sizes, float).T
    counted = tokens + overhead
    per_token, per_square = (
        np.array([getattr(stage, name) for stage in rates.stages]).T[:, :, None]
        for name in ("per_token", "per_square")
    )
    copy, hidden = (
        np.array([getattr(stage, name) for stage in rates.stages])[:, None] for name in ("copy", "hidden")
    )
    amounts, of_scores = (
        np.array([getattr(stage, name) for stage in rates.stages]).T[:, :, None]
        for name in ("amounts", "scores")
    )
    slices = np.array([astuple(stage.slices) for stage in rates.stages]).T[:, :, None]
    seconds = np.zeros((NOTHING + 1, len(rates.stages), len(tokens)))
    kept, taken = np.zeros_like(seconds), np.zeros_like(seconds)
    alone = per_token * counted + per_square * squares
    alone = np.maximum(alone, LEAST * alone.sum(axis=0))
    seconds[[F, I, W]] = alone
    within_whole = np.minimum(np.minimum(hidden * counted, alone[2]), (1 - LEAST) * alone[1])
    seconds[B] = alone[1] + alone[2] - within_whole
    seconds[COPY] = copy * tokens
    of_sequence, of_owed, replaced, expanded, masks = slices
    activation, released, workspace, in_whole = amounts * tokens + of_scores * scores
    in_slices = end * expanded + (end > 0) * (scores * masks - tokens * replaced)
    kept[F] = taken[F] = np.maximum(0.0, activation + in_slices)
    kept[I] = -np.minimum(kept[F], released + in_slices)
    kept[W], kept[B] = -kept[I] - kept[F], -kept[F]
    taken[I], taken[B] = np.maximum(0.0, workspace) + np.maximum(0.0, kept[I]), np.maximum(0.0, in_whole)
    if rates.head is not None:
        seconds[S], seconds[T] = rates.head.scores * tokens, rates.head.weight_gradient * tokens
        kept[S] = taken[S] = rates.head.activation * tokens
        kept[T] = -kept[S]
    delays = _delays(rates)
    delays[0] *= len(lengths.documents) / len(lengths)
    table = Table(seconds, kept, taken, of_owed * owes, delays, rates.pair)
    return _with_shared(table, of_sequence * stored, of_sequence * stored + of_owed * owed)


def _delays(costs: Costs | LengthCosts) -> Floats:
    head = costs.head
    return np.array([costs.hop, head.hidden if head else 0.0, head.sums if head else 0.0, 0.0])
