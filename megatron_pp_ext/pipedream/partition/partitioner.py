"""Cuts a profiled model into stages for pipelining without a flush (PipeDream, SOSP 2019, section 3.1).

    found = partition(profile, [Level(workers=8, bandwidth=3.125e9)])
    found.bottleneck_seconds            # between one microbatch and the next
    [(stage.layers, stage.replicas) for stage in found.stages]

The answer is the best partition there is, not a good one: ``recurrence`` has the dynamic programme.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_pp_ext.job.layers import spelled
from megatron_pp_ext.pipedream.partition.antichains import States, states_of
from megatron_pp_ext.pipedream.partition.cost_formulas import FORMULAS, StageLoad, in_flight, worker_bytes
from megatron_pp_ext.pipedream.partition.recurrence import Level, MemoryWorker, StageBlock, Worker, hierarchy
from megatron_pp_ext.schedule.formats.profile import Profile

MOST_WORKERS = 4096
"""The most workers of one level; time and memory of the search grow with their square."""

MOST_IN_ALL = 10**9
"""The most workers of all levels together."""

MOST_STATE = 1e6
"""The most bytes of gradients and optimizer state for each byte of weights."""


@dataclass(frozen=True, slots=True)
class PartitionStage:
    """A stage: the positions of its ``layers`` in the profile, and the number of its ``replicas``.

    ``seconds`` is forward and backward of one microbatch on one replica.  ``memory_bytes`` on each worker
    are ``in_flight`` microbatches, as many weight versions, and the state that goes with the weights.
    """

    layers: tuple[int, ...]
    replicas: int
    seconds: float
    in_flight: int
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Partition:
    """The best pipeline: its seconds between microbatches, next to the seconds of simpler arrangements."""

    stages: tuple[PartitionStage, ...]
    bottleneck_seconds: float
    data_parallel_seconds: float
    single_worker_seconds: float

    @property
    def speedup(self) -> float:
        """The speedup over data parallelism on the same workers."""
        return self.data_parallel_seconds / self.bottleneck_seconds

    @property
    def noam(self) -> int:
        """Microbatches in flight on a replica of the input stage: ceil(workers / its replicas)."""
        return self.stages[0].in_flight

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(stage.replicas for stage in self.stages)

    def record(self, profile: Profile) -> dict[str, Any]:
        """Return the numbers for a JSON file; layers count from 0."""
        return {
            **asdict(self),
            "stages": [
                {
                    "first": min(stage.layers),
                    "last": max(stage.layers),
                    **asdict(stage),
                    "layers": [profile.layers[at].name for at in stage.layers],
                }
                for stage in self.stages
            ],
            "speedup": self.speedup,
            "noam": self.noam,
        }


def partition(
    profile: Profile,
    levels: Sequence[Level],
    *,
    cost: str = "links",
    memory: float = math.inf,
    state_per_weight: float = 0.0,
    straight: bool = False,
) -> Partition:
    """Return the partition with the fewest seconds between microbatches that uses every worker.

    ``levels`` go from the innermost outwards.  ``cost`` is a name from ``FORMULAS``.  ``memory`` is in bytes
    of each worker; gradients and optimizer state take ``state_per_weight`` of them for each byte of weights.
    A ``straight`` pipeline has one worker for each stage.  ValueError where a value is out of its range,
    where there are more stages than layers, or where nothing fits in ``memory`` (the error states what
    would).
    """
    _check(profile, levels, cost, memory, state_per_weight, straight)
    states = states_of(profile)
    worker = Worker(states, memory, state_per_weight)
    solver = hierarchy(states, worker, levels, FORMULAS[cost], straight)
    if math.isinf(solver.best):
        memory_worker = MemoryWorker(states, state_per_weight=state_per_weight)
        least = hierarchy(states, memory_worker, levels, worker_bytes, straight).best
        if math.isinf(least):
            raise ValueError(
                f"a straight pipeline over {solver.workers} workers has stages of layers without any costs, "
                "which are not searched in a graph with so many branches: use fewer, or allow replicas"
            )
        raise ValueError(
            f"a memory of {memory:g} bytes is infeasible: the leanest partition over {solver.workers} "
            f"worker(s) needs {math.ceil(least)} bytes of one: raise it to at least {math.ceil(least)}"
        )
    return Partition(
        stages=_stages(states, worker, solver.split(0, len(states) - 1, 0.0)),
        bottleneck_seconds=solver.best,
        data_parallel_seconds=_data_parallel(states, levels, cost),
        single_worker_seconds=profile.seconds,
    )


def _check(
    profile: Profile,
    levels: Sequence[Level],
    cost: str,
    memory: float,
    state_per_weight: float,
    straight: bool,
) -> None:
    if cost not in FORMULAS:
        raise ValueError(f"the cost {cost!r} is unknown: choose one of {', '.join(FORMULAS)}")
    if not levels:
        raise ValueError("there are no machines to run on: give at least one level of them")
    for level in levels:
        if level.workers < 1:
            raise ValueError(f"the number of workers is {level.workers}, but must be 1 or more: raise it")
        if level.workers > MOST_WORKERS:
            raise ValueError(
                f"the number of workers is {level.workers}, but at most {MOST_WORKERS} of one level can be "
                "searched: give machines within machines, each with a level of its own"
            )
        if not 1 <= level.bandwidth < math.inf:
            raise ValueError(
                f"the bandwidth is {level.bandwidth:g}, but must be a finite number of 1 or more: "
                "give the bytes a second of a link"
            )
    if math.isnan(memory) or memory <= 0:
        raise ValueError(f"the memory is {memory:g}, but must be a number of bytes above 0: correct it")
    if not 0 <= state_per_weight <= MOST_STATE:
        raise ValueError(
            f"the state per weight is {state_per_weight:g}, but must be a number from 0 to {MOST_STATE:g}: "
            "give bytes of gradients and optimizer state for each byte of weights"
        )
    workers, layers = math.prod(level.workers for level in levels), len(profile.layers)
    if workers > MOST_IN_ALL:
        raise ValueError(
            f"all levels together have {workers:g} workers, but at most {MOST_IN_ALL:g} can be counted: "
            "leave a level out"
        )
    if straight and workers > layers:
        raise ValueError(
            f"a straight pipeline over {workers} workers needs as many layers, but the profile has {layers}: "
            f"use at most {layers} workers, or allow replicas"
        )


def _stages(states: States, worker: Worker, blocks: Sequence[StageBlock]) -> tuple[PartitionStage, ...]:
    depths = in_flight([block.replicas for block in blocks])
    return tuple(
        PartitionStage(
            layers=states.layers(block.start, block.end),
            replicas=block.replicas,
            seconds=float(states.seconds[block.end] - states.seconds[block.start]),
            in_flight=depth,
            memory_bytes=float(worker.bytes(block.start, block.end, np.array([depth]))[0, 0]),
        )
        for block, depth in zip(blocks, depths, strict=True)
    )


def _data_parallel(states: States, levels: Sequence[Level], cost: str) -> float:
    seconds, machines = states.seconds[-1], 1
    for level in levels:
        load = StageLoad(
            seconds=seconds,
            weights=states.weights[-1],
            bytes_in=0.0,
            bytes_out=0.0,
            replicas=level.workers,
            bandwidth=level.bandwidth,
            machines=machines,
            is_first=True,
        )
        seconds, machines = FORMULAS[cost](load), level.workers
    return float(seconds)


_SYMBOLS = ("E", "t", "L")


def is_megatrons(profile: Profile) -> bool:
    """Whether every layer is one that a layout has a letter for."""
    return all(layer.symbol in _SYMBOLS for layer in profile.layers)


def layout_of(partition: Partition, profile: Profile) -> str:
    """Return the layout; ValueError for a model that is not Megatron's.

    A layout has one letter for each layer (E embedding, t transformer layer, L output layer and loss), ``*n``
    after a letter that is repeated n times, and ``|`` between stages: ``Et*3|t*5|t*4L``.
    """
    for layer in profile.layers:
        if layer.symbol not in _SYMBOLS:
            raise ValueError(
                f"layer {layer.name!r} has the symbol {layer.symbol!r}, but a layout consists of E, t and L: "
                "profile a Megatron model with mpp profile or --profile-pipeline"
            )
    return spelled(["".join(profile.layers[at].symbol for at in stage.layers) for stage in partition.stages])


def replicas_flag(partition: Partition) -> str:
    """Return the flag for the replicas of the stages; empty where Megatron's data parallelism is enough.

    Data parallelism gives all stages the same number of replicas.
    """
    counts = partition.replicas
    return f"--pipeline-replicas {'-'.join(map(str, counts))}" if len(set(counts)) > 1 else ""


def training_flags(partition: Partition, profile: Profile) -> str:
    """Return the flags that train a partition, without the model's flags.

    ValueError for one stage, which is no pipeline, and for a model that is not Megatron's.
    """
    if len(partition.stages) == 1:
        raise ValueError(
            "one stage with all workers is the best cut, for which there are no flags: train it with data "
            "parallelism alone"
        )
    sizes = f"--pipeline-model-parallel-size {len(partition.stages)}"
    layout = f"--pipeline-model-parallel-layout '{layout_of(partition, profile)}'"
    return " ".join(filter(None, ("--pipeline-schedule pipedream", sizes, layout, replicas_flag(partition))))
