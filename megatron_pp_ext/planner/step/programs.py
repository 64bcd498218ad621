"""Schedules prepared for the estimates of time and memory, with the most bytes that each rank keeps."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Option, of_sizes
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.placement import Placement, linear
from megatron_pp_ext.schedule.program import F, I, Program, S, T, W, as_list
from megatron_pp_ext.schedule.simulate import most_buffers
from megatron_pp_ext.schedule.timing import ScheduleTimer


class InFlight:
    """The microbatches that each rank has in flight at every moment, before the bytes of a chunk are known.

    A moment is a row of five numbers for each chunk: microbatches between F and I, microbatches between I
    and W, whether an I is running, whether a whole backward is, and whether a forward runs together with one.
    The last number of the row counts the microbatches between S and T.

    They depend only on the order of the rank's own actions.  ``simulate`` computes the same, with times.

    A forward and a backward that run together take turns by layer, so that one frees what the other keeps,
    but for one layer (``Part.of_layer``).
    """

    def __init__(self, program: Program) -> None:
        self._placement = program.placement
        self._moments = [_moments(program, rank) for rank in range(program.ranks)]

    def peaks(self, parts: Sequence[Part], from_s_to_t: float = 0.0) -> tuple[float, ...]:
        """Return the most bytes that each rank keeps at one time, for stages that cost ``parts``.

        Of a microbatch between S and T it keeps ``from_s_to_t``.
        """
        of_ranks = map(self._placement.stages_of, range(self._placement.ranks))
        return tuple(
            self.peak(rank, [parts[stage] for stage in stages], from_s_to_t)
            for rank, stages in enumerate(of_ranks)
        )

    def waiting(self, parts: Sequence[Part]) -> tuple[float, ...]:
        """Return the most bytes that wait for W on each rank at one time, for stages that cost ``parts``."""
        stages_of = self._placement.stages_of
        return tuple(
            float(
                (
                    moments[:, 1:-1:5] @ np.array([parts[s].after_input_gradient for s in stages_of(rank)])
                ).max()
            )
            for rank, moments in enumerate(self._moments)
        )

    def peak(self, rank: int, parts: Sequence[Part], from_s_to_t: float = 0.0) -> float:
        """Return the most bytes that ``rank`` keeps at one time; ``parts`` are the costs of its stages."""
        bytes_each = [
            value
            for part in parts
            for value in (
                part.after_forward,
                part.after_input_gradient,
                max(0.0, part.after_input_gradient + part.workspace - part.after_forward),
                part.workspace_in_whole,
                part.of_layer,
            )
        ]
        return float((self._moments[rank] @ np.array([*bytes_each, from_s_to_t])).max())


def _moments(program: Program, rank: int) -> Any:
    """Return an array of moments x (5 x chunks + 1); see ``InFlight``."""
    placement, columns = program.placement, slice(*program.columns.bounds[rank : rank + 2])
    now = [0] * (5 * placement.chunks + 1)
    joined: int | None = None
    moments: set[tuple[int, ...]] = {tuple(now)}
    stages, kinds, places = (
        as_list(column[columns])
        for column in (program.columns.stage, program.columns.kind, program.columns.place)
    )
    for stage, kind, place in zip(stages, kinds, places, strict=True):
        if kind in (S, T):
            now[-1] += 1 if kind == S else -1
            moments.add(tuple(now))
            continue
        at = 5 * (stage // placement.ranks)
        if kind == F and place > program.no_work:
            joined = at
            continue
        if kind == F:
            now[at] += 1
            moments.add(tuple(now))
            continue
        during = [*now]
        if kind == W:
            now[at + 1] -= 1
            continue
        during[at + (2 if kind == I else 3)] = 1
        if joined is not None:
            during[joined + 4] = 1
            now[joined] += 1
        moments.add(tuple(during))
        now[at], joined = now[at] - 1, None
        if kind == I:
            now[at + 1] += 1
        moments.add(tuple(now))
    return np.array(sorted(moments))


class Prepared:
    """A schedule with all that an estimate derives from it, of which each is made once.

    With ``is_repeated`` compiled loops make it, for a search.  Raises InvalidSchedule when the ranks wait for
    each other.
    """

    def __init__(self, schedule: Schedule, is_repeated: bool = False) -> None:
        self.timer = ScheduleTimer(schedule, is_repeated)

    @cached_property
    def in_flight(self) -> InFlight:
        """The activations in flight."""
        return InFlight(self.timer.walk.program)

    @cached_property
    def peak_messages(self) -> tuple[int, ...]:
        """The most message buffers that each rank holds at one time."""
        return most_buffers(self.timer.walk)


def placement_of(name: str, ranks: int, chunks: int, splits_head: bool = False) -> Placement:
    """Return where schedule ``name`` puts ``ranks`` x ``chunks`` stages, and whether these split the head.

    Raises ValueError for an unknown name and for chunks that the schedule does not accept.
    """
    if ranks == 1 or not catalog.abilities(name).flushes:
        return linear(ranks)
    return replace(catalog.entry(name).placement(ranks, chunks), splits_head=splits_head)


def _prepared(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    splits_head: bool = False,
    options: tuple[Option, ...] = (),
    is_repeated: bool = True,
) -> Prepared:
    """Return schedule ``name``, prepared; ValueError for sizes that it cannot be built for.

    With ``splits_head`` all ranks, of which there are several, split the head; ``options`` are those of
    features.
    """
    sizes = name, ranks, microbatches, chunks
    request = of_sizes(*sizes, splits_head=splits_head, options=options)
    return Prepared(make(request, is_proved=True).schedule, is_repeated)


program = lru_cache(maxsize=512)(partial(_prepared, is_repeated=False))
"""Programs that are prepared for few estimates."""

whole_program = lru_cache(maxsize=128)(_prepared)
"""The programs of whole steps, of which a search goes back to the latest only."""

short_program = lru_cache(maxsize=4096)(_prepared)
"""The programs of a few microbatches, which many candidates of a search have in common."""
