"""A whole pipeline from what some of its ranks measured alone, each in a process of its own.

A rank that is rehearsed runs its own actions in their real order, with the neighbours' tensors made up.  So
the seconds of its actions and its peak are measured; how the ranks wait for each other is simulated.

An action does not take the same time twice, and ranks that wait for each other wait for the slower one: of
actions that all took their mean, a step would come out too short.  So every measured step is simulated with
what its actions took, one by one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple, Self

from megatron_pp_ext.planner.system import System
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.replay import makespan
from megatron_pp_ext.schedule.simulate import Timeline, simulate

PLACES = ("first", "middle", "last")
"""What --ranks calls the ranks of a pipeline, beside their numbers and ``all``."""


class Collective(NamedTuple):
    """What an action of a chunk asked of a group of ``ranks``, ``stride`` apart.

    ``operation`` is one of ``all_reduce``, ``gather`` (a reduce-scatter too) and ``all_to_all``; ``size`` are
    the bytes of the whole tensor.
    """

    chunk: int
    kind: str
    operation: str
    size: int
    ranks: int
    stride: int

    def seconds(self, system: System) -> float:
        """How long it keeps every rank of the group waiting."""
        take = {
            "all_reduce": system.all_reduce_seconds,
            "gather": system.gather_seconds,
            "all_to_all": system.all_to_all_seconds,
        }
        return take[self.operation](self.size, self.ranks, self.stride)


@dataclass(frozen=True, slots=True)
class RankRehearsal:
    """What one rank measured.

    ``stages`` are those of its chunks, in seconds and bytes, without the ``collectives`` of one microbatch,
    which take no time when nobody else is there, and without messages, each of ``message_bytes``.
    ``outside_seconds`` go by between the last action of a step and the first of the next: optimizer, logging,
    data.  ``peak_activation_bytes`` is the recorder's.  ``weight_bytes``, ``gradient_bytes`` and
    ``optimizer_bytes`` are of the tensors that the rank holds; ``device_bytes`` is the allocator's peak, None
    on a machine that has no device to ask.  ``layers`` tells the layers of every stage of the pipeline.
    ``ratios`` are a row a timed step: by how much each action of the rank, in its order, took longer than
    ``stages`` says.
    """

    rank: int
    schedule: str
    digest: str
    layers: tuple[int, ...]
    stages: tuple[StageCosts, ...]
    collectives: tuple[Collective, ...]
    message_bytes: int
    outside_seconds: float
    peak_activation_bytes: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    device_bytes: int | None = None
    ratios: tuple[tuple[float, ...], ...] = ()

    def write(self, path: Path) -> None:
        """Keep it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """What ``write`` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        content["stages"] = tuple(StageCosts(**stage) for stage in content["stages"])
        content["collectives"] = tuple(Collective(*one) for one in content["collectives"])
        content["layers"] = tuple(content["layers"])
        content["ratios"] = tuple(map(tuple, content["ratios"]))
        return cls(**content)


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one rank of the pipeline holds at most, by what it is for.

    ``rehearsed_on`` is the rank whose figures these are; of another one's activations the simulation tells
    the peak.  ``messages`` are as many as may wait: alone, a rank sends to nobody.
    """

    rehearsed_on: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    messages: float

    @property
    def total(self) -> float:
        """All of it, as if the peak of activations fell together with everything else."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.messages


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The pipeline put together: a simulated step, and the bytes of every rank.

    In ``timeline`` an action takes what is typical of its kind; ``pipeline_seconds`` is the median of the
    steps with what actions took one by one.
    """

    timeline: Timeline
    pipeline_seconds: float
    outside_seconds: float
    ranks: tuple[RankBytes, ...]

    @property
    def step_seconds(self) -> float:
        """From the first action of a step to the first of the next: all ranks meet in the optimizer."""
        return self.pipeline_seconds + self.outside_seconds


def chosen_ranks(words: str, ranks: int) -> list[int]:
    """The ranks that ``--ranks`` names: ``first,last``, ``0,3``, ``all``; ValueError for what is none."""
    numbers = dict(zip(PLACES, (0, ranks // 2, ranks - 1), strict=True))
    chosen: set[int] = set()
    for word in words.split(","):
        if word == "all":
            chosen |= set(range(ranks))
        elif word in numbers:
            chosen.add(numbers[word])
        elif word.isdecimal() and int(word) < ranks:
            chosen.add(int(word))
        else:
            raise ValueError(
                f"--ranks got {word!r}, but takes {', '.join(PLACES)}, all or numbers from 0 to {ranks - 1}, "
                "with commas between: correct it"
            )
    return sorted(chosen)


def stand_in(rank: int, rehearsed: Sequence[int], ranks: int) -> int:
    """Whose figures ``rank`` gets: its own, or those of the nearest rank, one from the middle if any was."""
    if rank in rehearsed:
        return rank
    inner = [other for other in rehearsed if 0 < other < ranks - 1]
    return min(inner or rehearsed, key=lambda other: abs(other - rank))


def put_together(
    found: Mapping[int, RankRehearsal], schedule: Schedule, system: System | None, world: int
) -> Rehearsal:
    """Simulate ``schedule`` with what the rehearsed ranks measured.

    Collectives and messages take as long as on ``system``, whose slowest link between any of the ``world``
    ranks all messages get; without a system, none.  The reduction of gradients is not in it.

    Raises ValueError where ranks ran different schedules, or where one would stand in for a rank whose
    stages have other numbers of layers.
    """
    for one in found.values():
        if one.digest != schedule.digest:
            raise ValueError(
                f"rank {one.rank} rehearsed another schedule than rank {min(found)}: start again, and give "
                "flex its --pipeline-costs"
            )
    placement, layers = schedule.placement, next(iter(found.values())).layers
    source = [stand_in(rank, sorted(found), placement.ranks) for rank in range(placement.ranks)]
    for rank, other in enumerate(source):
        own, theirs = ([layers[stage] for stage in placement.stages_of(r)] for r in (rank, other))
        if own != theirs:
            raise ValueError(
                f"rank {rank} has stages of {own} layers and rank {other}, which would stand in for it, of "
                f"{theirs}: set --ranks all, or name rank {rank} as well"
            )
    stages = tuple(
        _stage(found[source[placement.rank_of(stage)]], placement.chunk_of(stage), system)
        for stage in range(placement.stages)
    )
    message = next(iter(found.values())).message_bytes
    hop = 0.0
    if system is not None:
        link = system.node if world <= system.gpus_per_node else system.network
        hop = link.seconds(message)
    timeline = simulate(schedule, Costs(stages, hop, message))
    waiting = timeline.peak_messages
    ranks = tuple(
        RankBytes(
            other,
            found[other].weight_bytes,
            found[other].gradient_bytes,
            found[other].optimizer_bytes,
            found[rank].peak_activation_bytes if other == rank else timeline.peak_activations[rank],
            waiting[rank] * message,
        )
        for rank, other in enumerate(source)
    )
    outside = max(one.outside_seconds for one in found.values())
    return Rehearsal(timeline, _pipeline_seconds(timeline, found, source), outside, ranks)


def _pipeline_seconds(timeline: Timeline, found: Mapping[int, RankRehearsal], source: Sequence[int]) -> float:
    """The median over measured steps, each action as much longer or shorter as it was in that step.

    Ranks with the same stand-in take it from different steps, lest they all be slow at once.
    """
    schedule, costs = timeline.schedule, timeline.costs
    placement = schedule.placement
    known = [
        {
            (placement.chunk_of(action.stage), action.kind, action.microbatch): place
            for place, action in enumerate(schedule.orders[rank])
        }
        for rank in range(placement.ranks)
    ]
    steps = min(len(one.ratios) for one in found.values())

    def seconds(step: int, action: Action) -> float:
        rank, cost = placement.rank_of(action.stage), costs.stages[action.stage]
        other = source[rank]
        place = known[other].get((placement.chunk_of(action.stage), action.kind, action.microbatch))
        if place is None:  # one rank's B is another's I and W
            return cost.seconds(action.kind)
        return cost.seconds(action.kind) * found[other].ratios[(step + rank - other) % steps][place]

    if not steps:
        return timeline.makespan
    return median(makespan(schedule, partial(seconds, step), costs.hop) for step in range(steps))


def _stage(measured: RankRehearsal, chunk: int, system: System | None) -> StageCosts:
    """The chunk's costs, its collectives added."""
    costs = measured.stages[chunk]
    if system is None:
        return costs
    waits = dict.fromkeys(Kind, 0.0)
    for one in measured.collectives:
        if one.chunk == chunk:
            waits[Kind(one.kind)] += one.seconds(system)
    return replace(
        costs,
        forward=costs.forward + waits[Kind.F],
        input_gradient=costs.input_gradient + waits[Kind.I] + waits[Kind.B],
        weight_gradient=costs.weight_gradient + waits[Kind.W],
    )
