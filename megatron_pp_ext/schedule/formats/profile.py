"""The costs of each layer of a model, which are the input of the partitioner.

Layers depend on one another as a chain or as any directed acyclic graph.  ``profile_file`` has the form of
the file.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import ClassVar, Self

from megatron_pp_ext.json_input import STRICT, require_printable

MOST = 1e18
"""The most seconds or bytes of a layer, with which the partitioner's sums and products stay finite."""

LEAST_SECONDS = 1e-18
"""The fewest seconds of a whole model, of which a worker's part is still a number above 0."""


@dataclass(frozen=True, slots=True)
class ProfiledLayer:
    """The costs of one layer for one microbatch, on one worker.

    ``activation_bytes`` is the size of the output, which is sent to the next stage where a stage ends here.
    ``saved_bytes`` is the memory that the layer keeps for its backward; None where it was not measured, and
    then the output stands for it, as in PipeDream (SOSP 2019, section 3.1).  ``symbol`` is the layer's letter
    in Megatron's --pipeline-model-parallel-layout (E embedding, t transformer layer, L output and loss),
    empty for other models.  ValueError for a number that is not from 0 to ``MOST``.
    """

    __pydantic_config__: ClassVar = STRICT

    name: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: float
    parameter_bytes: float
    saved_bytes: float | None = None
    symbol: str = ""

    def __post_init__(self) -> None:
        require_printable(self.name)
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MOST:
                raise ValueError(
                    f"layer {self.name!r}: {name} is {value:g}, but must be a finite number from 0 to "
                    f"{MOST:g}: correct it or profile again"
                )

    @property
    def seconds(self) -> float:
        """The seconds of forward and backward, PipeDream's T of the layer."""
        return self.forward_seconds + self.backward_seconds

    @property
    def kept_bytes(self) -> float:
        """The bytes that one microbatch in flight keeps of this layer."""
        return self.activation_bytes if self.saved_bytes is None else self.saved_bytes


_NUMBERS = ("forward_seconds", "backward_seconds", "activation_bytes", "parameter_bytes", "saved_bytes")


@dataclass(frozen=True, slots=True)
class Profile:
    """Layers in an order in which every edge leads forward.

    An edge (a, b) of positions in ``layers`` means that b reads the output of a.
    """

    layers: tuple[ProfiledLayer, ...]
    edges: tuple[tuple[int, int], ...]

    @classmethod
    def chain(cls, layers: Iterable[ProfiledLayer]) -> Self:
        """Return the profile of layers that each read the output of the one before."""
        layers = tuple(layers)
        return cls.graph(layers, [(a.name, b.name) for a, b in pairwise(layers)])

    @classmethod
    def graph(cls, layers: Sequence[ProfiledLayer], edges: Iterable[tuple[str, str]]) -> Self:
        """Return the profile of layers in any order, with edges by name.

        ValueError without layers or time, for a name that comes twice or is unknown, and for a cycle.
        """
        if not layers:
            raise ValueError("the profile has no layers: give it at least one")
        position: dict[str, int] = {}
        for number, layer in enumerate(layers):
            if layer.name in position:
                raise ValueError(
                    f"the name {layer.name!r} comes twice in the profile: names must differ, rename one"
                )
            position[layer.name] = number
        seconds = math.fsum(layer.seconds for layer in layers)
        if seconds < LEAST_SECONDS:
            raise ValueError(
                f"all layers of the profile take {seconds:g} s together, but must take {LEAST_SECONDS:g} s "
                "or more: profile again"
            )
        names = list(dict.fromkeys(edges))
        for edge in names:
            for name in edge:
                if name not in position:
                    raise ValueError(
                        f"the edge {edge[0]} -- {edge[1]} names {name!r}, but there is no such layer: "
                        "add the layer or leave the edge out"
                    )
        order = _sorted(len(layers), [(position[a], position[b]) for a, b in names], [x.name for x in layers])
        place = {layers[number].name: at for at, number in enumerate(order)}
        return cls(
            tuple(layers[number] for number in order), tuple(sorted((place[a], place[b]) for a, b in names))
        )

    @property
    def is_chain(self) -> bool:
        """Whether every layer reads the one before and no other."""
        return self.edges == tuple((at, at + 1) for at in range(len(self.layers) - 1))

    @property
    def seconds(self) -> float:
        """The seconds of forward and backward of one microbatch on one worker."""
        return math.fsum(layer.seconds for layer in self.layers)


def _sorted(count: int, edges: list[tuple[int, int]], names: list[str]) -> list[int]:
    """Return an order in which every edge leads forward, and small numbers come as early as they can.

    ValueError for a cycle.
    """
    sorter = TopologicalSorter[int]({number: () for number in range(count)})
    for a, b in edges:
        sorter.add(b, a)
    try:
        sorter.prepare()
    except CycleError as error:
        path = " -- ".join(names[number] for number in error.args[1])
        raise ValueError(
            f"the layers {path} form a cycle, but layers must only read earlier ones: drop an edge"
        ) from None
    ready, order = [*sorter.get_ready()], list[int]()
    while ready:
        ready.sort(reverse=True)
        order.append(number := ready.pop())
        sorter.done(number)
        ready += sorter.get_ready()
    return order
