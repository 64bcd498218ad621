"""The dynamic programme of PipeDream's partitioner (SOSP 2019, section 3.1).

    A(i..j, m) = min( T(i..j, m),
                      min over s, r of max( A(i..s, m-r), T(s+1..j, r) ) )

is the seconds between microbatches of the best pipeline of the layers i..j on exactly m workers; T(i..j, r)
is one stage of them with r replicas and the links that it needs (see ``cost_formulas``).  Machines form a
hierarchy: at level k a "worker" is a whole machine of level k-1, and a stage's seconds on it are that
machine's A; at level 0 they are sums of profiled seconds.

Positions are states (see ``antichains``), so i..j is a pair of states, and s runs over the states between.
All m, s and several i are computed at once, in numpy; j and r are loops.  Beyond max and min there is no
arithmetic between stages, so the result is exact, not a sum that rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from megatron_pp_ext.pipedream.partition.antichains import Array, States
from megatron_pp_ext.pipedream.partition.cost_formulas import Formula, StageLoad, versions

_BLOCK = 32
"""The number of first states that are computed together: enough for numpy, and few enough for the cache."""


@dataclass(frozen=True, slots=True)
class Level:
    """A machine: ``workers`` of the level below, joined by links of ``bandwidth`` bytes a second each."""

    workers: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class StageBlock:
    """One stage: the layers between two states, on ``replicas`` workers."""

    start: int
    end: int
    replicas: int


@dataclass(frozen=True, slots=True)
class _Choices:
    """The choices for a stage, with a row for each pair of replicas and depth (see ``Solver``).

    ``rows[r]`` has the rows of r replicas after 0, 1, ... workers.
    """

    replicas: Array
    depths: Array
    rows: dict[int, Array]


class Solver(Protocol):
    """One worker of some level: ``machines`` of the level below, ``workers`` of level 0.

    Where memory is limited, a block's microbatches in flight matter, and with them ``downstream``: the
    level-0 workers after the block, divided by its replicas.  ``depths`` maps these numbers to the few
    distinct ones that make a difference, which ``seconds`` takes.
    """

    workers: int
    machines: int

    def depths(self, downstream: Array) -> Array:
        """Return for every number of ``downstream`` the one that ``seconds`` takes for it."""

    def seconds(self, start: int, end: int, depths: Array) -> Array:
        """Return the seconds of the blocks k..``end`` for every k from ``start``: [depth, k].

        They are infinite where k..``end`` is no block or cannot be run.
        """

    def split(self, start: int, end: int, downstream: float) -> list[StageBlock]:
        """Return the stages of the best pipeline of one block, in order."""


class Worker:
    """Level 0: a worker runs a whole block if it fits in ``memory`` bytes.

    In addition to weight versions and activations it keeps ``state_per_weight`` bytes for each byte of
    weights.
    """

    workers = machines = 1

    def __init__(self, states: States, memory: float = np.inf, state_per_weight: float = 0.0) -> None:
        self._states, self._memory, self._state_per_weight = states, memory, state_per_weight

    def depths(self, downstream: Array) -> Array:
        """Return the weight versions that a worker keeps, or ones where memory is not limited."""
        return versions(downstream) if self._memory < np.inf else np.ones_like(downstream)

    def seconds(self, start: int, end: int, depths: Array) -> Array:
        states = self._states
        seconds = states.seconds[end] - states.seconds[start:end]
        seconds[~states.before[start:end, end]] = np.inf
        return np.where(self.bytes(start, end, depths) <= self._memory, seconds, np.inf)

    def bytes(self, start: int, end: int, depths: Array) -> Array:
        """Return the bytes that a worker keeps of these blocks, in the shape of ``seconds``."""
        weights = self._states.weights[end] - self._states.weights[start:end]
        activations = self._states.kept[end] - self._states.kept[start:end]
        return depths[:, np.newaxis] * (activations + weights) + self._state_per_weight * weights

    def split(self, start: int, end: int, downstream: float) -> list[StageBlock]:
        return [StageBlock(start, end, 1)]


class MemoryWorker(Worker):
    """A worker whose "seconds" are its bytes, minimised with the formula ``worker_bytes``."""

    def depths(self, downstream: Array) -> Array:
        return np.asarray(versions(downstream))

    def seconds(self, start: int, end: int, depths: Array) -> Array:
        return np.where(self._states.before[start:end, end], self.bytes(start, end, depths), np.inf)


class Machine:
    """Level 1 and up: pipelines over the ``level.workers`` machines below, each with a solver like ``inner``.

    A ``straight`` pipeline has no replicas.
    """

    def __init__(self, states: States, inner: Solver, level: Level, formula: Formula, straight: bool) -> None:
        self._states, self._inner, self._level, self._formula = states, inner, level, formula
        self._replicas = range(1, 2 if straight else level.workers + 1)
        self.machines, self.workers = level.workers, inner.workers * level.workers
        self._tables: dict[float, Array] = {}

    @cached_property
    def best(self) -> float:
        """The seconds between microbatches of the whole model's best pipeline; infinity if there is none."""
        return float(self._solve(0, 1, 0.0)[0, -1, -1])

    def depths(self, downstream: Array) -> Array:
        does_matter = len(set(self._inner.depths(np.array([0.0, self.workers])))) > 1
        return downstream if does_matter else np.zeros_like(downstream)

    def seconds(self, start: int, end: int, depths: Array) -> Array:
        return np.stack([self._table(float(depth))[start:end, end] for depth in depths])

    def split(self, start: int, end: int, downstream: float) -> list[StageBlock]:
        """See ``Solver``.  Among equally good ones, late stages have as few replicas as possible."""
        solved = self._solve(start, 1, downstream)[0]
        stages: list[StageBlock] = []
        workers = self._level.workers
        while workers:
            first, replicas = self._last_stage(solved, start, end, workers, downstream)
            workers -= replicas
            after = float(self._downstream(replicas, np.asarray(workers), downstream))
            inner = self._inner.split(first, end, after)
            stages = [
                StageBlock(block.start, block.end, block.replicas * replicas) for block in inner
            ] + stages
            end = first
        return stages

    def _table(self, downstream: float) -> Array:
        """Return A of all blocks on all workers of this level: [first state, last state]."""
        if downstream not in self._tables:
            count = len(self._states)
            table = np.full((count, count), np.inf)
            for start in range(0, count, _BLOCK):
                rows = min(_BLOCK, count - start)
                table[start : start + rows, start:] = self._solve(start, rows, downstream)[:, -1]
            self._tables[downstream] = table
        return self._tables[downstream]

    @lru_cache(maxsize=1)  # noqa: B019  (`split` needs once more what `best` has solved)
    def _solve(self, start: int, rows: int, downstream: float) -> Array:
        """Compute A of the blocks that begin at ``start`` and the ``rows - 1`` states after it.

        Return [first state - start, workers, last state - start]; infinity where there is no pipeline.
        """
        count, workers = len(self._states) - start, self._level.workers
        solved = np.full((rows, workers + 1, count), np.inf)
        space = np.empty((rows, workers, count))
        choices = self._choices(downstream)
        for end in range(1, count):
            best = np.full((rows, workers + 1), np.inf)
            first, later = self._stages(choices, start, start + end)
            for replicas, row in choices.rows.items():
                firsts = first[row[0], :rows]
                best[: len(firsts), replicas] = np.minimum(best[: len(firsts), replicas], firsts)
                pipelines = space[:, 1 : workers + 1 - replicas, :end]
                stage = later[row[1:]] if row[0] < row[-1] else later[row[:1]]
                np.maximum(solved[:, 1 : workers + 1 - replicas, :end], stage, out=pipelines)
                after = best[:, 1 + replicas :]
                np.minimum(after, pipelines.min(axis=-1, initial=np.inf), out=after)
            solved[:, :, end] = best
        return solved

    def _choices(self, downstream: float) -> _Choices:
        """Return the numbers of replicas that a stage can have, and how deep it then is."""
        choices: list[tuple[int, float]] = []
        rows = {}
        for replicas in self._replicas:
            before = np.arange(self._level.workers + 1 - replicas)
            depths = self._inner.depths(self._downstream(replicas, before, downstream))
            # The deepest comes first, so that row numbers rise wherever there are several.
            distinct, row = np.unique(-depths, return_inverse=True)
            rows[replicas] = row + len(choices)
            choices += [(replicas, -depth) for depth in distinct.tolist()]
        counts, all_depths = zip(*choices, strict=True)
        return _Choices(np.array(counts)[:, np.newaxis], np.array(all_depths), rows)

    def _stages(self, choices: _Choices, start: int, end: int) -> tuple[Array, Array]:
        """Return the seconds of a stage k..``end``, for every k from ``start``: [row of ``choices``, k].

        The first array is for a stage with which the pipeline begins, the second for a later one.
        """
        states, crossing = self._states, self._states.crossing
        load = StageLoad(
            seconds=self._inner.seconds(start, end, choices.depths),
            weights=states.weights[end] - states.weights[start:end],
            bytes_in=crossing[start:end],
            bytes_out=crossing[end],
            replicas=choices.replicas,
            bandwidth=self._level.bandwidth,
            machines=self._inner.machines,
            is_first=True,
        )
        return self._formula(load), self._formula(load._replace(is_first=False))

    def _downstream(self, replicas: int, before: Array, downstream: float) -> Array:
        """Return the level-0 workers after a stage for each of its ``replicas``.

        ``before`` workers of this level are before the stage, and ``downstream`` level-0 workers after the
        whole block.
        """
        return ((self._level.workers - replicas - before) * self._inner.workers + downstream) / replicas

    def _last_stage(
        self, solved: Array, start: int, end: int, workers: int, downstream: float
    ) -> tuple[int, int]:
        """Return first state and replicas of the last stage in the best pipeline of start..end."""
        best = solved[workers, end - start]
        choices = self._choices(downstream)
        first, later = self._stages(choices, start, end)
        for replicas, row in choices.rows.items():
            before = workers - replicas
            if before == 0 and first[row[0], 0] <= best:
                return start, replicas
            if before > 0:
                pipelines = np.maximum(solved[before, : end - start], later[row[before]])
                if pipelines.min() <= best:
                    return start + int(np.argmin(pipelines)), replicas
        raise AssertionError("the recurrence gave a time that none of its own choices has")


def hierarchy(
    states: States, worker: Worker, levels: Sequence[Level], formula: Formula, straight: bool
) -> Machine:
    """Return the solver of the outermost of ``levels``, which go from the innermost outwards."""
    solver: Solver = worker
    for level in levels:
        solver = Machine(states, solver, level, formula, straight)
    assert isinstance(solver, Machine)
    return solver
