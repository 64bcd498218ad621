"""Plays a pipeline without a flush on workers with full-duplex links: a judge of cuts that knows no formula.

Every worker computes one thing at a time, and its link has two directions, each of which serves transfers in
the order in which they are asked for.  A transfer passes the sender's outgoing direction and then the
receiver's incoming one, as through a switch with buffers.  Microbatches go round robin over the replicas of
a stage.  A replica prefers backwards to forwards and keeps at most ``depth`` microbatches in flight.

After the backwards of r microbatches, one on each of r replicas, a ring all-reduce takes 2 (r-1) steps, in
each of which every replica sends and receives an r-th of the gradients.  The replicas compute meanwhile, but
the forward that is ``depth`` + 1 microbatches later waits for the update.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_pp_ext.pipedream.partition.partitioner import Partition
from megatron_pp_ext.schedule.formats.profile import Profile


@dataclass(frozen=True)
class StageWork:
    """A stage: seconds of a microbatch on one replica, bytes of weights and of the cut before the stage."""

    forward: float
    backward: float
    weights: float
    bytes_in: float
    replicas: int
    depth: int


def stages_of(partition: Partition, profile: Profile, depth_factor: int = 1) -> list[StageWork]:
    """Return the work of each stage, with ``depth_factor`` times its microbatches in flight."""
    work, before = [], set[int]()
    for stage in partition.stages:
        layers = [profile.layers[at] for at in stage.layers]
        crossing = {a for a, b in profile.edges if a in before and b not in before}
        work.append(
            StageWork(
                forward=sum(layer.forward_seconds for layer in layers),
                backward=sum(layer.backward_seconds for layer in layers),
                weights=sum(layer.parameter_bytes for layer in layers),
                bytes_in=sum(profile.layers[at].activation_bytes for at in crossing),
                replicas=stage.replicas,
                depth=depth_factor * stage.in_flight,
            )
        )
        before |= set(stage.layers)
    return work


def makespan(stages: Sequence[StageWork], bandwidth: float, microbatches: int) -> float:
    """Return the seconds from the first forward to the last backward or update of ``microbatches``.

    Their number is a multiple of the replicas of each stage, so that all of a stage do equally many.
    """
    return _Game(stages, bandwidth, microbatches).play()


def seconds_of_a_microbatch(stages: Sequence[StageWork], bandwidth: float) -> float:
    """Return the seconds by which one more microbatch makes a long run longer, without filling and draining.

    They are the difference between a run and one of twice as many microbatches.  In the shorter one, every
    replica does several times as many as it keeps in flight.
    """
    rounds = 40 + 2 * max(stage.depth for stage in stages)
    multiple = math.lcm(*(stage.replicas for stage in stages))
    count = multiple * math.ceil(rounds * max(stage.replicas for stage in stages) / multiple)
    return (makespan(stages, bandwidth, 2 * count) - makespan(stages, bandwidth, count)) / count


@dataclass
class _Replica:
    """A worker: when each direction of its link is free, and how far its microbatches are."""

    first: int
    out_free: float = 0.0
    in_free: float = 0.0
    is_busy: bool = False
    forwards: int = 0
    backwards: int = 0
    updates: int = 0
    inputs: set[int] = field(default_factory=set)
    gradients: set[int] = field(default_factory=set)

    def send(self, now: float, seconds: float) -> float:
        """Return when the outgoing direction has served a transfer that is asked for now."""
        self.out_free = max(self.out_free, now) + seconds
        return self.out_free

    def receive(self, now: float, seconds: float) -> float:
        """Return when the incoming direction has served a transfer that arrives now."""
        self.in_free = max(self.in_free, now) + seconds
        return self.in_free


class _Game:
    def __init__(self, stages: Sequence[StageWork], bandwidth: float, microbatches: int) -> None:
        self.stages, self.bandwidth, self.microbatches = stages, bandwidth, microbatches
        self.replicas = [[_Replica(first) for first in range(stage.replicas)] for stage in stages]
        self.round_sizes: dict[tuple[int, int], int] = {}
        self.now, self.job = 0.0, 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []

    def play(self) -> float:
        """Return when the last event happened."""
        for replica in self.replicas[0]:
            replica.inputs = set(range(replica.first, self.microbatches, self.stages[0].replicas))
            self.compute(0, replica)
        while self.events:
            self.now, _, happen = heapq.heappop(self.events)
            happen()
        updates = [
            worker.updates * stage.replicas
            for stage, ring in zip(self.stages, self.replicas, strict=True)
            for worker in ring
        ]
        assert set(updates) == {self.microbatches}, f"the pipeline has come to a stop: {updates}"
        return self.now

    def at(self, time: float, happen: Callable[[], None]) -> None:
        self.job += 1
        heapq.heappush(self.events, (time, self.job, happen))

    def compute(self, number: int, replica: _Replica) -> None:
        """Start the replica's next work, unless it is busy."""
        stage = self.stages[number]
        backward = replica.first + replica.backwards * stage.replicas
        forward = replica.first + replica.forwards * stage.replicas
        if replica.is_busy:
            return
        if backward in replica.gradients:
            replica.is_busy = True
            self.at(self.now + stage.backward, lambda: self.end_backward(number, replica, backward))
        elif (
            forward in replica.inputs
            and replica.forwards - replica.backwards < stage.depth
            and replica.forwards - replica.updates <= stage.depth
        ):
            replica.is_busy = True
            self.at(self.now + stage.forward, lambda: self.end_forward(number, replica, forward))

    def end_forward(self, number: int, replica: _Replica, microbatch: int) -> None:
        replica.is_busy, replica.forwards = False, replica.forwards + 1
        if number + 1 < len(self.stages):
            receiver = self.replica_of(number + 1, microbatch)
            self.transfer(replica, number + 1, receiver, receiver.inputs, microbatch)
        else:
            replica.gradients.add(microbatch)
        self.compute(number, replica)

    def end_backward(self, number: int, replica: _Replica, microbatch: int) -> None:
        replica.is_busy, replica.backwards = False, replica.backwards + 1
        if number > 0:
            receiver = self.replica_of(number - 1, microbatch)
            self.transfer(replica, number - 1, receiver, receiver.gradients, microbatch)
        self.reduce(number, microbatch // self.stages[number].replicas)
        self.compute(number, replica)

    def transfer(
        self, sender: _Replica, number: int, receiver: _Replica, arrivals: set[int], microbatch: int
    ) -> None:
        """Send an activation or a gradient to ``receiver`` of stage ``number`` over the cut between them."""
        cut = number if arrivals is receiver.inputs else number + 1
        seconds = self.stages[cut].bytes_in / self.bandwidth

        def arrive() -> None:
            arrivals.add(microbatch)
            self.compute(number, receiver)

        self.at(sender.send(self.now, seconds), lambda: self.at(receiver.receive(self.now, seconds), arrive))

    def reduce(self, number: int, round_number: int) -> None:
        """All-reduce the gradients of a round when all replicas have theirs."""
        stage, place = self.stages[number], (number, round_number)
        self.round_sizes[place] = self.round_sizes.get(place, 0) + 1
        if self.round_sizes[place] < stage.replicas:
            return
        self.step(number, 2 * (stage.replicas - 1))

    def step(self, number: int, remaining: int) -> None:
        """Do the steps of an all-reduce that are left; in each, a replica sends and receives W / r bytes."""
        stage, ring = self.stages[number], self.replicas[number]
        if remaining > 0:
            seconds = stage.weights / stage.replicas / self.bandwidth
            served = [replica.send(self.now, seconds) for replica in ring]
            served += [replica.receive(self.now, seconds) for replica in ring]
            self.at(max(served), lambda: self.step(number, remaining - 1))
            return
        for replica in ring:
            replica.updates += 1
            self.compute(number, replica)

    def replica_of(self, number: int, microbatch: int) -> _Replica:
        return self.replicas[number][microbatch % self.stages[number].replicas]
