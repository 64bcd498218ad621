"""Every pipeline of a small model, one by one, with the formulas written out: the partitioner's oracle."""

import itertools
import math
from collections.abc import Iterator

from megatron_pp_ext.pipedream.partition.recurrence import Level
from megatron_pp_ext.schedule.formats.profile import Profile

Layers = frozenset[int]
Stages = list[tuple[Layers, int]]
"""The layers and the replicas of each stage."""


def compositions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``total`` as an ordered sum of positive numbers up to ``most``."""
    if total == 0:
        yield ()
    for first in range(1, min(total, most) + 1):
        for tail in compositions(total - first, most):
            yield (first, *tail)


class Oracle:
    def __init__(
        self, profile: Profile, levels: list[Level], cost: str, straight: bool = False, state: float = 0.0
    ) -> None:
        self.profile, self.levels, self.cost, self.straight = profile, levels, cost, straight
        self.state = state
        self.whole: Layers = frozenset(range(len(profile.layers)))
        self.cuts = [
            subset
            for count in range(len(profile.layers) + 1)
            for subset in map(frozenset, itertools.combinations(sorted(self.whole), count))
            if all(a in subset for a, b in profile.edges if b in subset)
        ]

    def best(self, memory: float = math.inf) -> float:
        return min(
            (seconds for seconds, stages in self.pipelines() if max(self.bytes(stages)) <= memory),
            default=math.inf,
        )

    def least_memory(self) -> float:
        return min(max(self.bytes(stages)) for _, stages in self.pipelines())

    def pipelines(self) -> Iterator[tuple[float, Stages]]:
        return self._pipelines(frozenset(), self.whole, len(self.levels))

    def bytes(self, stages: Stages) -> list[float]:
        """Of a worker of each stage.

        Its weights and activations, once for every microbatch in flight, and the weights' state once.
        """
        sizes = []
        for number, (layers, replicas) in enumerate(stages):
            to_the_end = sum(count for _, count in stages[number:])
            in_flight = -(-to_the_end // replicas)
            microbatch_bytes = sum(
                self.profile.layers[at].kept_bytes + self.profile.layers[at].parameter_bytes for at in layers
            )
            weights = sum(self.profile.layers[at].parameter_bytes for at in layers)
            sizes.append(in_flight * microbatch_bytes + self.state * weights)
        return sizes

    def _pipelines(self, start: Layers, end: Layers, depth: int) -> Iterator[tuple[float, Stages]]:
        """All pipelines of the layers between two cuts on all machines of a level, and their seconds."""
        if depth == 0:
            yield sum(self.profile.layers[at].seconds for at in end - start), [(end - start, 1)]
            return
        level = self.levels[depth - 1]
        inside = [cut for cut in self.cuts if start < cut < end]
        for replicas in compositions(level.workers, 1 if self.straight else level.workers):
            for cuts in itertools.combinations(inside, len(replicas) - 1):
                path = [start, *cuts, end]
                if any(not a < b for a, b in itertools.pairwise(path)):
                    continue
                inner = [list(self._pipelines(a, b, depth - 1)) for a, b in itertools.pairwise(path)]
                for choice in itertools.product(*inner):
                    seconds = self._seconds(
                        path, replicas, [inner_seconds for inner_seconds, _ in choice], depth
                    )
                    yield (
                        seconds,
                        [
                            (layers, count * copies)
                            for copies, (_, stages) in zip(replicas, choice, strict=True)
                            for layers, count in stages
                        ],
                    )

    def _seconds(
        self, path: list[Layers], replicas: tuple[int, ...], inner: list[float], depth: int
    ) -> float:
        bandwidth = self.levels[depth - 1].bandwidth
        machines = self.levels[depth - 2].workers if depth > 1 else 1
        worst = 0.0
        for number, (r, seconds) in enumerate(zip(replicas, inner, strict=True)):
            weights = sum(self.profile.layers[at].parameter_bytes for at in path[number + 1] - path[number])
            into, out = self._crossing(path[number]), self._crossing(path[number + 1])
            if self.cost == "paper":
                worst = max(worst, max(seconds, 2 * (r - 1) * weights / bandwidth) / r)
                if number > 0:
                    worst = max(worst, 2 * into / bandwidth)
            elif self.cost == "links":
                traffic = into + out + 2 * (r - 1) / r * weights
                worst = max(worst, seconds / r, traffic / bandwidth / r)
            else:
                shared_by = machines if number == 0 else 1
                worst = max(worst, (seconds + 4 * (r - 1) * weights / (bandwidth * r) / shared_by) / r)
                if number > 0:
                    worst = max(worst, 2 * into / (bandwidth * r), 2 * out / (bandwidth * r))
        return worst

    def _crossing(self, cut: Layers) -> float:
        read_outside = {a for a, b in self.profile.edges if a in cut and b not in cut}
        return sum(self.profile.layers[at].activation_bytes for at in read_outside)
