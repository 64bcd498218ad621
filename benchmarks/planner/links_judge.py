"""Plays a pipeline without a flush over links that send and receive at once, one queue for each direction.

The judge knows no formula.  Microbatches go round the replicas of a stage, a worker prefers backwards to
forwards, and every message waits in the queue of its sender, and then of its receiver.  When all replicas
have done one microbatch each, a ring all-reduce of the stage's gradients takes its part of all their links,
while they go on.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from megatron_pp_ext.partition.partitioner import Partition
from megatron_pp_ext.partition.profile import Profile


class Stage(NamedTuple):
    """A stage: seconds of its forward and backward, bytes that it sends on and of its weights, replicas."""

    forward: float
    backward: float
    sent: float
    weights: float
    replicas: int


def stages_of(profile: Profile, found: Partition) -> list[Stage]:
    """Return the stages of ``found``; the profile is a chain."""
    return [
        Stage(
            sum(profile.layers[at].forward_seconds for at in one.layers),
            sum(profile.layers[at].backward_seconds for at in one.layers),
            profile.layers[max(one.layers)].activation_bytes if one is not found.stages[-1] else 0.0,
            sum(profile.layers[at].parameter_bytes for at in one.layers),
            one.replicas,
        )
        for one in found.stages
    ]


def seconds(stages: Sequence[Stage], bandwidth: float, microbatches: int, depth: int = 3) -> float:
    """Return the seconds until all ``microbatches`` are done, and the gradients of whole rounds reduced.

    Every replica of the first stage has ``depth`` times as many microbatches in flight as its share of all
    workers, so that messages can hide behind the work on others.
    """
    return _Play(stages, bandwidth, microbatches, depth).end()


class _Play:
    def __init__(self, stages: Sequence[Stage], bandwidth: float, microbatches: int, depth: int) -> None:
        self._stages, self._bandwidth, self._count = stages, bandwidth, microbatches
        workers = sum(stage.replicas for stage in stages)
        self._in_flight = depth * -(-workers // stages[0].replicas) * stages[0].replicas
        self._time = 0.0
        self._events: list[tuple[float, int, int, str, int]] = []  # when, number, stage, what, microbatch
        self._free: defaultdict[tuple[str, int, int], float] = defaultdict(float)  # link of a worker
        self._ready: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._is_busy: defaultdict[tuple[int, int], bool] = defaultdict(bool)
        self._done: defaultdict[tuple[int, int], int] = defaultdict(int)  # by stage and round
        self._entered = self._left = 0

    def end(self) -> float:
        """Play until nothing is left to do."""
        self._enter()
        while self._events:
            self._time, _, stage, what, microbatch = heapq.heappop(self._events)
            if what == "arrives forward":
                self._offer(stage, 1, microbatch)
            elif what == "arrives backward":
                self._offer(stage, 0, microbatch)
            else:
                self._ended(stage, what, microbatch)
        return max(self._time, *self._free.values()) if self._free else self._time

    def _enter(self) -> None:
        while self._entered < self._count and self._entered - self._left < self._in_flight:
            self._entered += 1
            self._offer(0, 1, self._entered - 1)

    def _offer(self, stage: int, is_forward: int, microbatch: int) -> None:
        worker = stage, microbatch % self._stages[stage].replicas
        heapq.heappush(self._ready[worker], (is_forward, microbatch))
        self._start(*worker)

    def _start(self, stage: int, replica: int) -> None:
        ready = self._ready[stage, replica]
        if ready and not self._is_busy[stage, replica]:
            is_forward, microbatch = heapq.heappop(ready)
            self._is_busy[stage, replica] = True
            own = self._stages[stage]
            took = own.forward if is_forward else own.backward
            self._at(self._time + took, stage, "forward" if is_forward else "backward", microbatch)

    def _at(self, when: float, stage: int, what: str, microbatch: int) -> None:
        heapq.heappush(self._events, (when, len(self._events), stage, what, microbatch))

    def _ended(self, stage: int, what: str, microbatch: int) -> None:
        own = self._stages[stage]
        worker = stage, microbatch % own.replicas
        self._is_busy[worker] = False
        if what == "forward" and stage + 1 < len(self._stages):
            self._send(stage, stage + 1, own.sent, what, microbatch)
        elif what == "forward":
            self._offer(stage, 0, microbatch)
        elif stage:
            self._send(stage, stage - 1, self._stages[stage - 1].sent, what, microbatch)
        else:
            self._left += 1
            self._enter()
        if what == "backward":
            self._reduce(stage, microbatch)
        self._start(*worker)

    def _send(self, stage: int, to: int, size: float, what: str, microbatch: int) -> None:
        sender, receiver = (microbatch % self._stages[each].replicas for each in (stage, to))
        sent = self._carry("out", stage, sender, size, self._time)
        self._at(self._carry("in", to, receiver, size, sent), to, f"arrives {what}", microbatch)

    def _carry(self, way: str, stage: int, replica: int, size: float, arrives: float) -> float:
        """Return when ``size`` bytes are through a link.

        What comes in has been on its way out of another link, and can be through at once where nothing waits.
        """
        took, link = size / self._bandwidth, (way, stage, replica)
        begin = arrives if way == "out" else arrives - took
        self._free[link] = max(begin, self._free[link]) + took
        return self._free[link]

    def _reduce(self, stage: int, microbatch: int) -> None:
        count = self._stages[stage].replicas
        round_ = stage, microbatch // count
        self._done[round_] += 1
        if self._done[round_] == count > 1:
            size = 2 * (count - 1) / count * self._stages[stage].weights
            for replica in range(count):
                sent = self._carry("out", stage, replica, size, self._time)
                self._carry("in", stage, replica, size, sent)
