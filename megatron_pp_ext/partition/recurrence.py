"""The dynamic programme of PipeDream's partitioner (SOSP 2019, section 3.1).

    A(i..j, m) = min( T(i..j, m),
                      min over s, r of max( A(i..s, m-r), cut s, T(s+1..j, r) ) )

is the seconds between microbatches of the best pipeline of the layers i..j on exactly m workers; T(i..j, r)
is one stage of them with r replicas.  Machines form a hierarchy: at level k a "worker" is a whole machine of
level k-1, and a stage's seconds on it are that machine's A; at level 0 they are sums of profiled seconds.

Positions are states (see ``antichains``), so i..j is a pair of states, and s runs over the states between.
All m, s and several i are computed at once, in numpy; j and r are loops.  Beyond max and min there is no
arithmetic between stages, so the result is exact, not a sum that rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from megatron_pp_ext.partition.antichains import Array, States
from megatron_pp_ext.partition.cost_formulas import Cost
from megatron_pp_ext.partition.in_flight import versions

_BLOCK = 32
"""How many first states are computed together: enough to vectorise over, few enough for the cache."""


@dataclass(frozen=True, slots=True)
class Level:
    """``workers`` of the level below, joined by links of ``bandwidth`` bytes a second each."""

    workers: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Block:
    """One stage: what lies between two states, on ``replicas`` workers."""

    start: int
    end: int
    replicas: int


@dataclass(frozen=True, slots=True)
class _Choices:
    """What a stage can be, a row for each pair of replicas and depth (see ``Solver``).

    ``rows[r]`` says which row is that of r replicas behind 0, 1, ... workers.
    """

    replicas: Array
    depths: Array
    rows: dict[int, Array]


class Solver(Protocol):
    """One worker of some level: ``machines`` of the level below, ``workers`` of level 0.

    How many level-0 workers there are behind a block, for each copy of the block, matters where memory is
    limited.  ``depths`` tells what of that matters, as numbers to hand to ``seconds``.
    """

    workers: int
    machines: int

    def depths(self, behind: Array) -> Array:
        """What matters of ``behind``, number by number."""

    def seconds(self, start: int, end: int, depths: Array) -> Array:
        """Of the blocks k..``end`` for every k from ``start``: rows go by ``depths``, columns by k.

        Infinity where k..``end`` is no block or cannot be run.
        """

    def split(self, start: int, end: int, behind: float) -> list[Block]:
        """The stages of the best pipeline of one block, in order."""


class Worker:
    """Level 0: a worker runs a whole block.  With ``memory`` bytes, only what fits in.

    Beside weight versions and activations it keeps ``state_per_weight`` bytes for each byte of weights.
    """

    workers = machines = 1

    def __init__(self, states: States, memory: float = np.inf, state_per_weight: float = 0.0) -> None:
        self._states, self._memory, self._state_per_weight = states, memory, state_per_weight

    def depths(self, behind: Array) -> Array:
        """See ``Solver``: the weight versions that a worker keeps, where that can be too many."""
        return versions(behind) if self._memory < np.inf else np.ones_like(behind)

    def seconds(self, start: int, end: int, depths: Array) -> Array:
        """See ``Solver``."""
        states = self._states
        seconds = states.seconds[end] - states.seconds[start:end]
        seconds[~states.before[start:end, end]] = np.inf
        return np.where(self.bytes(start, end, depths) <= self._memory, seconds, np.inf)

    def bytes(self, start: int, end: int, depths: Array) -> Array:
        """What a worker keeps of these blocks, in the shape of ``seconds``."""
        weights = self._states.weights[end] - self._states.weights[start:end]
        kept = self._states.kept[end] - self._states.kept[start:end]
        return depths[:, np.newaxis] * (kept + weights) + self._state_per_weight * weights

    def split(self, start: int, end: int, behind: float) -> list[Block]:
        """See ``Solver``."""
        return [Block(start, end, 1)]


class Hoarder(Worker):
    """A worker whose "seconds" are its bytes: with ``cost.Footprint``, the programme minimises these."""

    def depths(self, behind: Array) -> Array:
        """See ``Solver``."""
        return np.asarray(versions(behind))

    def seconds(self, start: int, end: int, depths: Array) -> Array:
        """See ``Solver``."""
        return np.where(self._states.before[start:end, end], self.bytes(start, end, depths), np.inf)


class Machine:
    """Level 1 and up: pipelines over the ``level.workers`` machines below, each with a solver like ``inner``.

    A ``straight`` pipeline has no replicas.
    """

    def __init__(self, states: States, inner: Solver, level: Level, cost: Cost, straight: bool) -> None:
        self._states, self._inner, self._level, self._cost = states, inner, level, cost
        self._replicas = range(1, 2 if straight else level.workers + 1)
        self.machines, self.workers = level.workers, inner.workers * level.workers
        self._tables: dict[float, Array] = {}

    @cached_property
    def best(self) -> float:
        """Seconds between microbatches of the whole model's best pipeline; infinity if there is none."""
        return float(self._solve(0, 1, 0.0)[0, -1, -1])

    def depths(self, behind: Array) -> Array:
        """See ``Solver``."""
        does_matter = len(set(self._inner.depths(np.array([0.0, self.workers])))) > 1
        return behind if does_matter else np.zeros_like(behind)

    def seconds(self, start: int, end: int, depths: Array) -> Array:
        """See ``Solver``."""
        return np.stack([self._table(float(depth))[start:end, end] for depth in depths])

    def split(self, start: int, end: int, behind: float) -> list[Block]:
        """See ``Solver``.  Among equals, late stages have as few replicas as possible."""
        solved = self._solve(start, 1, behind)[0]
        stages: list[Block] = []
        workers = self._level.workers
        while workers:
            first, replicas = self._last_stage(solved, start, end, workers, behind)
            workers -= replicas
            inner = self._inner.split(first, end, float(self._behind(replicas, np.asarray(workers), behind)))
            stages = [Block(one.start, one.end, one.replicas * replicas) for one in inner] + stages
            end = first
        return stages

    def _table(self, behind: float) -> Array:
        """A of all blocks on all workers of this level: [first state, last state]."""
        if behind not in self._tables:
            count = len(self._states)
            table = np.full((count, count), np.inf)
            for start in range(0, count, _BLOCK):
                rows = min(_BLOCK, count - start)
                table[start : start + rows, start:] = self._solve(start, rows, behind)[:, -1]
            self._tables[behind] = table
        return self._tables[behind]

    @lru_cache(maxsize=1)  # noqa: B019  (what `best` has solved, `split` asks for again)
    def _solve(self, start: int, rows: int, behind: float) -> Array:
        """A of the blocks that begin at ``start`` and the ``rows - 1`` states after it.

        Returns [first state - start, workers, last state - start]; infinity where there is no pipeline.
        """
        count, workers = len(self._states) - start, self._level.workers
        solved = np.full((rows, workers + 1, count), np.inf)
        space = np.empty((rows, workers, count))
        choices = self._choices(behind)
        for end in range(1, count):
            best = np.full((rows, workers + 1), np.inf)
            first, later = self._stages(choices, start, start + end)
            for replicas, row in choices.rows.items():
                firsts = first[row[0], :rows]
                best[: len(firsts), replicas] = np.minimum(best[: len(firsts), replicas], firsts)
                both = space[:, 1 : workers + 1 - replicas, :end]
                stage = later[row[1:]] if row[0] < row[-1] else later[row[:1]]
                np.maximum(solved[:, 1 : workers + 1 - replicas, :end], stage, out=both)
                after = best[:, 1 + replicas :]
                np.minimum(after, both.min(axis=-1, initial=np.inf), out=after)
            solved[:, :, end] = best
        return solved

    def _choices(self, behind: float) -> _Choices:
        """The numbers of replicas that a stage can have, and how deep it then is."""
        found: list[tuple[int, float]] = []
        rows = {}
        for replicas in self._replicas:
            before = np.arange(self._level.workers + 1 - replicas)
            depths = self._inner.depths(self._behind(replicas, before, behind))
            # Deep first, so that a row number that rises says that there are several.
            distinct, row = np.unique(-depths, return_inverse=True)
            rows[replicas] = row + len(found)
            found += [(replicas, -depth) for depth in distinct.tolist()]
        counts, all_depths = zip(*found, strict=True)
        return _Choices(np.array(counts)[:, np.newaxis], np.array(all_depths), rows)

    def _stages(self, choices: _Choices, start: int, end: int) -> tuple[Array, Array]:
        """Seconds of a stage k..``end``, for every k from ``start``: [row of ``choices``, k].

        Returns those of a first stage, and those of a later one with its cuts.
        """
        states, bandwidth, replicas = self._states, self._level.bandwidth, choices.replicas
        weights = states.weights[end] - states.weights[start:end]
        inner = self._inner.seconds(start, end, choices.depths)
        first = self._cost.stage(inner, weights, replicas, bandwidth, self._inner.machines)
        later = self._cost.stage(inner, weights, replicas, bandwidth)
        cut = self._cost.cut(states.crossing[start:end], float(states.crossing[end]), replicas, bandwidth)
        return first, np.maximum(later, cut)

    def _behind(self, replicas: int, before: Array, behind: float) -> Array:
        """Level-0 workers behind each replica of a stage, ``before`` workers of this level before it."""
        return ((self._level.workers - replicas - before) * self._inner.workers + behind) / replicas

    def _last_stage(
        self, solved: Array, start: int, end: int, workers: int, behind: float
    ) -> tuple[int, int]:
        """(first state, replicas) of the last stage of the best pipeline of start..end on ``workers``."""
        wanted = solved[workers, end - start]
        choices = self._choices(behind)
        first, later = self._stages(choices, start, end)
        for replicas, row in choices.rows.items():
            before = workers - replicas
            if before == 0 and first[row[0], 0] <= wanted:
                return start, replicas
            if before > 0:
                both = np.maximum(solved[before, : end - start], later[row[before]])
                if both.min() <= wanted:
                    return start + int(np.argmin(both)), replicas
        raise AssertionError("a pipeline that was found is gone")


def hierarchy(states: States, worker: Worker, levels: Sequence[Level], cost: Cost, straight: bool) -> Machine:
    """The solver of the outermost of ``levels``, which go from the innermost outwards."""
    solver: Solver = worker
    for level in levels:
        solver = Machine(states, solver, level, cost, straight)
    assert isinstance(solver, Machine)
    return solver
