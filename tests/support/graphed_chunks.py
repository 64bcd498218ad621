"""Chunks of a few layers whose F, I and W are graphs of a slot (``graph_stub``), beside the same eagerly.

Layers have unequal widths: a wrong order may hide where all blocks of memory are of one size.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch

from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.slots import Slots
from tests.support.graph_stub import Graph, Pool, capture

ROWS = 6
WIDTHS = (40, 72, 24)

Unit = tuple[int, int]


def numbers(seed: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


class Sums(NamedTuple):
    """The gradients of a stage's weights."""

    of_layers: list[torch.Tensor]

    @classmethod
    def zeros(cls) -> "Sums":
        return cls([torch.zeros(below, above) for below, above in layers()])


def layers() -> Iterator[tuple[int, int]]:
    return pairwise(WIDTHS)


class Chunk:
    """One microbatch in the layers of ``stage``, which adds to ``sums``; with a ``pool``, a slot's graphs.

    A layer is y = tanh(x) w.  ``shared`` are buffers of output gradients that several slots have.
    """

    def __init__(
        self,
        stage: int,
        sums: Sums,
        pool: Pool | None = None,
        shared: dict[int, torch.Tensor] | None = None,
    ) -> None:
        self.weights = [numbers(10 * stage + at, *size) / 8 for at, size in enumerate(layers())]
        self.sums, self.pool, self._shared = sums, pool, shared
        self._saved: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._graphs: dict[str, list[Graph]] = defaultdict(list)
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs: dict[str, torch.Tensor] = {}

    def run(self, part: str, value: torch.Tensor | None) -> torch.Tensor | None:
        """Run F, I or W of all layers; with a pool, capture it."""
        places = range(len(self.weights))
        for at in places if part == "F" else reversed(places):
            with self._capturing(part):
                value = self._layer(part, at, value)
        return value

    def _layer(self, part: str, at: int, value: torch.Tensor | None) -> torch.Tensor | None:
        weight = self.weights[at]
        if part == "W":
            self.sums.of_layers[at].add_(self._saved.pop(at).t() @ self._gradients.pop(at))
            return None
        assert value is not None
        if part == "F":
            self._saved[at] = torch.tanh(value)
            return self._saved[at] @ weight
        self._gradients[at] = value  # an operand of W: the buffer of the chunk, or what the layer above wrote
        return (value @ weight.t()) * (1 - self._saved[at] * self._saved[at])

    def _capturing(self, part: str):
        if self.pool is None:
            return nullcontext()
        self._graphs[part].append(graph := Graph())
        return capture(graph, self.pool)

    def capture(self) -> "Chunk":
        for part in "FIW":
            if part == "W":
                self.run(part, None)
                continue
            self._inputs[part] = self._buffer(part)
            self._outputs[part] = self.run(part, self._inputs[part])
        return self

    def _buffer(self, part: str) -> torch.Tensor:
        columns = WIDTHS[0] if part == "F" else WIDTHS[-1]
        if part == "I" and self._shared is not None:
            return self._shared.setdefault(columns, torch.zeros(ROWS, columns))
        return torch.zeros(ROWS, columns)

    def replay(self, part: str, value: torch.Tensor | None) -> torch.Tensor | None:
        if value is not None:
            self._inputs[part].copy_(value)
        for graph in self._graphs[part]:
            graph.replay()
        return self._outputs.get(part)


class Defects(NamedTuple):
    """What a test plants: nothing by default."""

    ends_at_input: bool = False
    """A slot is free after the last I, whatever W reads."""
    fewer: int = 0
    """So many slots less than needed."""
    shares_gradients: bool = False
    """All slots have one buffer for the gradients of outputs."""


NO_DEFECTS = Defects()


def wrong_results(steps: Sequence[Sequence[Action]], defects: Defects = NO_DEFECTS) -> int:
    """Replay the ``steps`` of a rank by slots; return how many results are not those of eager layers.

    Results are the outputs of F and I, at once, and the sums of W in the end.  When a unit's slot ends by the
    plan, all its memory becomes NaN.
    """
    kinds = (Kind.F, Kind.I, Kind.B) if defects.ends_at_input else tuple(Kind)
    colored = [[action for action in step if action.kind in kinds] for step in steps]
    slots = Slots.of(colored)
    count = max(1, slots.count - defects.fewer)
    stages = {action.stage for step in steps for action in step}
    sums, eager_sums = ({stage: Sums.zeros() for stage in stages} for _ in range(2))
    shared: dict[int, torch.Tensor] | None = {} if defects.shares_gradients else None
    pools = [Pool() for _ in range(count)]
    chunks = {
        (stage, slot): Chunk(stage, sums[stage], pool, shared).capture()
        for slot, pool in enumerate(pools)
        for stage in sorted(stages)
    }
    eager: dict[Unit, Chunk] = {}
    ends = {
        (stage, microbatch): (at, kind) for at, step in enumerate(colored) for stage, kind, microbatch in step
    }
    wrong = 0
    for at, (stage, kind, microbatch), part in _parts(steps):
        unit = stage, microbatch
        slot = slots.by_unit[unit] % count
        chunk = chunks[stage, slot]
        value = _input(stage, microbatch, part)
        expected = eager.setdefault(unit, Chunk(stage, eager_sums[stage])).run(part, value)
        found = chunk.replay(part, value)
        wrong += part != "W" and not torch.equal(found, expected)
        if ends[unit] == (at, kind) and (kind is not Kind.B or part == "W"):
            pools[slot].kill()
    return wrong + sum(
        not torch.equal(found, expected)
        for stage in stages
        for found, expected in zip(sums[stage].of_layers, eager_sums[stage].of_layers, strict=True)
    )


def _parts(steps: Iterable[Sequence[Action]]) -> Iterator[tuple[int, Action, str]]:
    for at, step in enumerate(steps):
        for action in step:
            if action.kind in (Kind.F, Kind.I, Kind.W, Kind.B):
                yield from (
                    (at, action, part) for part in ("IW" if action.kind is Kind.B else action.kind.name)
                )


def _input(stage: int, microbatch: int, part: str) -> torch.Tensor | None:
    if part == "W":
        return None
    columns = WIDTHS[0] if part == "F" else WIDTHS[-1]
    return numbers(1000 + 100 * stage + 2 * microbatch + (part == "I"), ROWS, columns)
