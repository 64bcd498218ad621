"""A schedule prepared as ``step.programs.Program`` does, in a small part of the time, for searches."""

from functools import cached_property, lru_cache
from itertools import batched

import numpy as np

from megatron_pp_ext.planner.search import order_loops
from megatron_pp_ext.planner.step.action_arrays import Array, action_arrays
from megatron_pp_ext.planner.step.activation_peaks import InFlight
from megatron_pp_ext.planner.step.programs import scheduled
from megatron_pp_ext.schedule import messages
from megatron_pp_ext.schedule.actions import OF_STAGES, Kind, Schedule
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.timing import CriticalPath, Span


class ArrayProgram:
    """The actions of a schedule as arrays, with all that an estimate derives from them.

    It is its own timer, and all its numbers are those of ``Program``, to the last digit.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._placement = schedule.placement
        self._actions = actions = action_arrays(schedule.orders)
        rank_of = schedule.placement.rank_of
        self._home = np.array([rank_of(stage) for stage in range(schedule.placement.stages)])
        is_first = np.zeros(len(actions.stage), np.bool_)
        if schedule.paired:
            is_first[:] = [action in schedule.paired for action in schedule]
        shares = schedule.placement.shares_vocabulary
        self._steps, self._step_of, self._pairs = order_loops.follow(
            *actions[:3], is_first, actions.bounds, self._home, schedule.microbatches, shares
        )
        if len(self._steps) == 1:
            check(schedule)

    @property
    def timer(self) -> "ArrayProgram":
        """What times the schedule."""
        return self

    @cached_property
    def in_flight(self) -> InFlight:
        """The activations in flight."""
        return InFlight(self._placement, self._actions)

    @cached_property
    def peak_messages(self) -> tuple[int, ...]:
        """The most message buffers that each rank holds at one time."""
        of_stages = [messages.WORK[kind] for kind in OF_STAGES] * self._placement.stages
        durations = self._with_pairs([*of_stages, *_OF_VOCABULARY], 1.0)
        _, ends = order_loops.time(self._steps, durations, _PLANNED)
        ends = ends[self._step_of]
        ranks = np.repeat(np.arange(self._placement.ranks), np.diff(self._actions.bounds))
        line = np.lexsort((ranks, ends))
        stage, kind, _, bounds = self._actions
        most = order_loops.most_buffers(stage, kind, bounds, self._home, line, messages.SENDS_AHEAD + 1)
        return tuple(most.tolist())

    def spans(self, costs: Costs) -> tuple[Span, ...]:
        """Return every rank's span."""
        durations = self._durations(costs)
        starts, ends = order_loops.time(self._steps, durations, _wires(costs))
        seconds = durations.tolist()
        return tuple(
            Span(
                float(starts[first]), float(ends[last]), sum(count * seconds[work] for work, count in counts)
            )
            for first, last, counts in self._work
        )

    def critical_path(self, costs: Costs) -> CriticalPath:
        """Return the critical path with ``costs``; among several, the one that stays on its ranks."""
        durations = self._durations(costs)
        starts, ends = order_loops.time(self._steps, durations, _wires(costs))
        counts = order_loops.critical(self._steps, starts, ends, self._pairs, costs.pair, len(durations))
        by_stage = batched(counts[: len(OF_STAGES) * len(costs.stages)].tolist(), len(OF_STAGES))
        return CriticalPath(float(ends.max()), tuple((f, i + b, w + b) for f, i, w, b in by_stage))

    @cached_property
    def _work(self) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """The first and the last step of each rank, and how often it has which duration, by first use."""
        found = []
        for rank in range(self._placement.ranks):
            own = self._step_of[self._actions.of_rank(rank)]
            places = self._steps[own[np.diff(own, prepend=0) != 0], 3]
            values, first, counts = np.unique(places, return_index=True, return_counts=True)
            by_use = np.argsort(first)
            used = zip(values[by_use].tolist(), counts[by_use].tolist(), strict=True)
            found.append((int(own[0]), int(own[-1]), list(used)))
        return found

    def _durations(self, costs: Costs) -> Array:
        shared = costs.vocabulary
        own = (shared.scores, shared.weight_gradient) if shared else (0.0, 0.0)
        distinct = {id(stage): stage for stage in costs.stages}
        seconds = {key: [stage.seconds(kind) for kind in OF_STAGES] for key, stage in distinct.items()}
        of_stages = [took for stage in costs.stages for took in seconds[id(stage)]]
        return self._with_pairs([*of_stages, *own, 0.0], costs.pair)

    def _with_pairs(self, alone: list[float], pair: float) -> Array:
        """Return the durations of actions, no work and pairs; a pair takes what ``Costs.of_pair`` says."""
        durations = np.array(alone, float)
        first, second = durations[self._pairs].T
        together = np.maximum(np.maximum(pair * (first + second), first), second)
        return np.concatenate([durations, together])


_OF_VOCABULARY = (messages.WORK[Kind.S], messages.WORK[Kind.T], 0)
_PLANNED = np.array([messages.HOP, messages.HIDDEN, messages.SUMS, messages.SUMS], float)
"""The durations behind those of stages, and the wires, by which ``schedule.messages`` plans a launch line."""


def _wires(costs: Costs) -> Array:
    shared = costs.vocabulary
    return np.array([costs.hop, shared.hidden if shared else 0.0, shared.sums if shared else 0.0, 0.0])


def _array_program(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    shares_vocabulary: bool = False,
    is_paired: bool = False,
) -> ArrayProgram:
    """Return schedule ``name``, prepared; ValueError for sizes that it cannot be built for."""
    return ArrayProgram(scheduled(name, ranks, microbatches, chunks, shares_vocabulary, is_paired))


array_program = lru_cache(maxsize=128)(_array_program)
"""The programs of whole steps, of which a search goes back to the latest only."""

short_program = lru_cache(maxsize=4096)(_array_program)
"""The programs of a few microbatches, which many candidates have in common."""
