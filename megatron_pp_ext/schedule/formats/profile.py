"""The costs of each layer of a model, as JSON or as PipeDream's ``graph.txt``; the partitioner reads them.

Layers depend on one another as a chain or as any directed acyclic graph.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

from megatron_pp_ext.files import read_text, write_json
from megatron_pp_ext.json_input import STRICT, naming, parse_as, require_printable

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


_FIELDS = {
    "forward_compute_time": 1e-3,
    "backward_compute_time": 1e-3,
    "activation_size": 1.0,
    "parameter_size": 1.0,
}
"""The fields, and the factors that convert them to seconds and bytes."""


def read_graph_txt(text: str) -> Profile:
    """Return the profile in ``text``; ValueError, naming line or layer, for any other form.

    The file has one line for each layer, with times in milliseconds, sizes in bytes, and several outputs in
    brackets, and one line for each edge, which begins with a tab:

        node2 -- LSTM -- forward_compute_time=2.2, backward_compute_time=4.5, activation_size=[6.0; 1.0], ...
            node2 -- node3

    The fourth field is ``parameter_size``.

    As in PipeDream's optimizer, nodes that only stand for the data are left out: a node called ``Input...``
    that reads nothing, and a node called ``__getitem__...`` that nothing reads.
    """
    layers: dict[str, ProfiledLayer] = {}
    kinds: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        words = line.strip().split(" -- ")
        if line.startswith("\t"):
            if len(words) != 2:
                raise ValueError(f"line {number}: {line.strip()!r} is no edge: write 'node1 -- node2'")
            edges.append((words[0], words[1]))
            continue
        if len(words) < 3:
            raise ValueError(
                f"line {number}: {line.strip()!r} is no layer: write 'node1 -- name -- fields', and a tab "
                "before an edge"
            )
        if words[0] in layers:
            raise ValueError(f"line {number}: {words[0]} comes twice: names must differ, rename one")
        layers[words[0]] = _layer(words[0], words[2])
        kinds[words[0]] = words[1]
    readers, read_ones = {a for a, _ in edges}, {b for _, b in edges}
    data = {
        name
        for name, kind in kinds.items()
        if (kind.startswith("Input") and name not in read_ones)
        or (kind.startswith("__getitem__") and name not in readers)
    }
    return Profile.graph(
        [layer for name, layer in layers.items() if name not in data],
        [(a, b) for a, b in edges if a not in data and b not in data],
    )


def _layer(name: str, text: str) -> ProfiledLayer:
    fields = dict(part.split("=", 1) for part in text.split(", ") if "=" in part)
    values = []
    for field, unit in _FIELDS.items():
        if field not in fields:
            raise ValueError(f"layer {name!r}: {field} is missing: add it or profile again")
        try:
            values.append(unit * sum(float(word) for word in fields[field].strip("[]").split(";")))
        except ValueError:
            raise ValueError(
                f"layer {name!r}: {field} is {fields[field]!r}, but must be a number: profile again"
            ) from None
    forward, backward, activation, parameter = values
    return ProfiledLayer(name, forward, backward, activation, parameter)


def write(profile: Profile, path: Path) -> None:
    """Write ``profile`` to ``path`` as JSON.

        {"layers": [{"name": "embedding", "forward_seconds": 0.0002, "backward_seconds": 0.0004,
                     "activation_bytes": 4194304, "parameter_bytes": 1048576, "saved_bytes": 4325376,
                     "symbol": "E"}, ...],
         "edges": [["embedding", "layer 1"], ...]}

    The names are those of ``ProfiledLayer``.  ``saved_bytes`` and ``symbol`` may be left out, and ``edges``
    where the layers are a chain.
    """
    rows = [
        {name: value for name, value in asdict(layer).items() if value not in (None, "")}
        for layer in profile.layers
    ]
    content: dict[str, Any] = {"layers": rows}
    if not profile.is_chain:
        content["edges"] = [[profile.layers[a].name, profile.layers[b].name] for a, b in profile.edges]
    write_json(path, content)


def read(path: str | Path) -> Profile:
    """Return the profile in ``path``: JSON if it begins with a brace, else PipeDream's ``graph.txt``.

    ValueError, naming the file, for anything that is neither.
    """
    with naming(path):
        try:
            text = read_text(Path(path))
        except UnicodeDecodeError:
            raise ValueError("not a text: give a JSON profile or PipeDream's graph.txt") from None
        profile = _read_json(text) if text.lstrip().startswith("{") else read_graph_txt(text)
        if len(profile.layers) > 1 and not profile.edges:
            raise ValueError(
                f"no edges, so that none of {len(profile.layers)} layers reads another: write an edge for "
                "each that does, in graph.txt with a tab before 'node1 -- node2'"
            )
        return profile


@dataclass(frozen=True, slots=True)
class _Content:
    __pydantic_config__: ClassVar = STRICT

    layers: tuple[ProfiledLayer, ...]
    edges: tuple[tuple[str, str], ...] | None = None


def _read_json(text: str) -> Profile:
    content = parse_as(_Content, text, "write {'layers': [...]}")
    if content.edges is None:
        return Profile.chain(content.layers)
    return Profile.graph(content.layers, content.edges)
