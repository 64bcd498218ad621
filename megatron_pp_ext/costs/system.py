"""Descriptions of the machines that a model may run on: the speed of products, copies and messages."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, Self

from megatron_pp_ext.files import read_text
from megatron_pp_ext.json_input import (
    STRICT,
    above,
    at_least,
    did_you_mean,
    naming,
    of_length,
    one_of,
    parse_as,
    printable,
)


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at ``at`` between rising ``points``, and that of the first or last outside of them."""
    for (low, before), (high, after) in pairwise(points):
        if at <= high:
            return before + (after - before) * max(0.0, at - low) / (high - low)
    return points[-1][1]


_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Tiles of cuBLAS, rows x columns, the most efficient ones first (same guide, section 2.3)."""

_MOST_REUSED = 256 * 128 / (256 + 128)
"""Multiplications for each number that the largest tile loads."""

_SLOWER_BY_REUSE = 0.1
"""The power of a tile's reuse by which a smaller tile, which loads more for each product, is slower."""

_LOST_OF_WAVE = 0.5
"""The loss by processors that a last wave leaves idle; kernels that split loops fill the others."""

AROUND_LOOP = 128.0
"""The time of a tile besides its loop, in steps of it, for a system without a value."""


@lru_cache(maxsize=65536)
def efficiency(
    m: float, n: float, k: float, processors: int, around_loop: float = AROUND_LOOP, groups: float = 1
) -> float:
    """Return the share of the best rate that ``groups`` products of m x k with k x n reach, in (0, 1].

    It is the best tile's.  A tile takes ``around_loop`` steps and the k of its loop.  The share is 1
    where the number of ``processors`` is 0, not known.  Both constants above, and the ``around_loop`` of
    every system and type, are fitted to one half of the measured products, and hold for the other half
    (benchmarks/results/components.md).

    The result is cut into tiles.  Each processor (SM, compute unit) works on a tile at a time, so that parts
    of tiles at the edge, and of a last wave that does not fill all processors, are lost; and a tile costs
    some time besides its loop over the inner dimension (NVIDIA, Matrix Multiplication Background User's
    Guide, sections 2.3, 3.1 and 3.2).
    """
    if not processors:
        return 1.0
    return max(_with_tile(m, n, k, processors, around_loop, groups, *tile) for tile in _TILES)


def _with_tile(
    m: float, n: float, k: float, processors: int, around: float, groups: float, rows: int, columns: int
) -> float:
    tiles = groups * math.ceil(m / rows) * math.ceil(n / columns)
    reuse = rows * columns / (rows + columns) / _MOST_REUSED
    operations = waves(tiles, processors) * processors * rows * columns * (k + around)
    return float(reuse**_SLOWER_BY_REUSE * groups * m * n * k / operations)


def waves(tiles: float, processors: int) -> float:
    """Return how many times as long as one tile ``tiles`` take, of which each processor has one at a time."""
    whole = tiles / processors
    return max(1.0, whole + _LOST_OF_WAVE * (math.ceil(whole) - whole))


DTYPES = ("bf16", "fp32", "fp8", "fp8_block", "fp4")
"""The number formats of ``matrix_rates``; fp16 counts as bf16, FP8 has scales of tensors or of blocks, and
FP4 is NVFP4."""

type Text = Annotated[str, printable()]
type Dtype = Annotated[str, one_of(*DTYPES)]
type Sustained = Annotated[str, one_of("clock", "copy", "cast", "network", "overlap", "group", "scale")]
type Positive = Annotated[float, above(0)]
type NotNegative = Annotated[float, at_least(0)]
type Count = Annotated[int, at_least(1)]
type CountOrNone = Annotated[int, at_least(0)]
type MatrixRate = Annotated[Sequence[Positive], of_length(4)]
type AttentionRate = Annotated[Sequence[Positive], of_length(3)]
type Collective = Annotated[Sequence[Positive], of_length(3)]


@dataclass(frozen=True, slots=True)
class Link:
    """One GPU's share of a link in one direction: bytes a second, and the seconds of an empty message."""

    __pydantic_config__: ClassVar = STRICT

    bytes_per_second: Positive
    latency_seconds: NotNegative = 0.0

    def seconds(self, size: float) -> float:
        """Return the seconds that a message of ``size`` bytes takes."""
        return self.latency_seconds + size / self.bytes_per_second


_SHIPPED = resources.files("megatron_pp_ext.costs") / "systems"

_MEASURED_GPUS = 8
_OF_A_GPU = ("clock", "copy", "cast")
"""The shares of ``System.sustained`` by which the slowest of many GPUs is slower."""


@dataclass(frozen=True, slots=True)
class System:
    """One kind of GPU, its nodes of ``gpus_per_node``, and the network between them.

    ``node`` is the link between the GPUs of a node, or of ``gpus_per_domain`` where switches join several
    nodes, as NVLink does in a rack.

    ``matrix_rates`` has for each number format rows of (m, n, k, operations a second) for a product of
    m x k with k x n.  ``peak_rates`` are the data sheet's operations a second, for the utilisation; where
    there are none, the best of ``matrix_rates`` stands for them.  ``copy_bytes_per_second`` is of device
    memory, reading plus writing.  ``all_reduce``, ``gather`` (also for a reduce-scatter) and ``all_to_all``
    have rows of (ranks, bytes, seconds) where they were measured within a node; elsewhere a ring on the links
    is assumed.

    ``host`` is the link between a GPU and the memory of its node's processors, of which a GPU's share is
    ``host_memory_bytes_per_second``, reading plus writing; where they are absent, nothing can be offloaded.
    ``gpus_per_host_link`` GPUs of one switch share the link (``host_beside_others``).
    ``processors`` are the SMs or compute units, 0 where product shapes make no difference, and
    ``around_loop`` what a tile of each number format takes besides its loop (``efficiency``);
    ``attention_rates`` has rows of (width of a head, operations a second, keys) of fused attention, which
    takes as long for each query as so many keys more than it sees would, and ``attention_backward_rates`` has
    such rows of its backward, which runs as fast as the forward where there are none;
    ``kernel_seconds`` is the host's time to start a kernel. ``exposed_sums`` is the share of the time to
    read and write gradients that a product which adds to them does not hide: one where a processor works on
    one tile at a time. ``persistent_products`` is whether products have a block on every processor, and
    divide their tiles among these blocks before they start.
    ``sustained`` has the share of these rates that training keeps up, 1 where it is left out: "clock" of
    products and attention, whose clock is lower under load than in the short measurement of one alone, "copy"
    of small kernels, which device memory bounds, "network", and "scale" (``at_scale``).
    ``fp8_recipes`` are the values of --fp8-recipe with which products run; None means all
    but mxfp8.  ``reserved_bytes`` of the memory are the driver's and the communicators'.  ``sources`` has for
    each field where it was read or how it was measured.

    A description is JSON with the fields of ``System``, each figure with its source; some are shipped in
    ``costs/systems``.  Rates are the ones that a well-tuned program reaches, not a data sheet's; peaks serve
    only to compute the utilisation.

        {"name": "h100", "gpus_per_node": 8, "memory_bytes": 8e10,
         "matrix_rates": {"bf16": [[8192, 8192, 8192, 7.2e14]]}, "copy_bytes_per_second": 3.35e12,
         "node": {"bytes_per_second": 3.7e11, "latency_seconds": 3.4e-6},
         "network": {"bytes_per_second": 5e10, "latency_seconds": 1.4e-5},
         "sources": {"memory_bytes": "data sheet"}}
    """

    __pydantic_config__: ClassVar = STRICT

    name: Text
    gpus_per_node: Count
    memory_bytes: Positive
    matrix_rates: Mapping[Dtype, Sequence[MatrixRate]]
    copy_bytes_per_second: Positive
    node: Link
    network: Link
    host: Link | None = None
    host_memory_bytes_per_second: NotNegative = 0.0
    gpus_per_host_link: Count = 1
    processors: CountOrNone = 0
    around_loop: Mapping[Dtype, NotNegative] = field(default_factory=dict)
    attention_rates: Sequence[AttentionRate] = ()
    attention_backward_rates: Sequence[AttentionRate] = ()
    kernel_seconds: NotNegative = 0.0
    exposed_sums: NotNegative = 0.0
    persistent_products: bool = False
    sustained: Mapping[Sustained, Positive] = field(default_factory=dict)
    reserved_bytes: NotNegative = 0.0
    peak_rates: Mapping[Dtype, Positive] = field(default_factory=dict)
    all_reduce: Sequence[Collective] = ()
    gather: Sequence[Collective] = ()
    all_to_all: Sequence[Collective] = ()
    fp8_recipes: Sequence[str] | None = None
    gpus_per_domain: CountOrNone = 0
    sources: Mapping[Text, Text] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.matrix_rates.get("bf16") and not self.matrix_rates.get("fp32"):
            raise ValueError(f"system {self.name}: matrix_rates has neither bf16 nor fp32: give one a row")

    def at_scale(self, gpus: int) -> Self:
        """Return the system as a job of so many ``gpus`` finds it.

        A step waits for the slowest of them.  The sustained parts of computation and copies are multiplied by
        "scale" for each doubling of a node of 8 GPUs, on which they are measured.
        """
        if gpus <= _MEASURED_GPUS or "scale" not in self.sustained:
            return self
        scale = self.sustained["scale"] ** math.log2(gpus / _MEASURED_GPUS)
        shares = {"clock": 1.0, "copy": 1.0, **self.sustained}
        del shares["scale"]
        shares.update({name: scale * shares[name] for name in _OF_A_GPU if name in shares})
        return replace(self, sustained=shares)

    @property
    def host_beside_others(self) -> Link | None:
        """``host`` as a GPU has it while the others of its switch copy, too: with its part of the rate.

        These are neighbours, which have the same stages in Megatron's order of ranks, as tensor-parallel or
        data-parallel ones.  So they copy at the same times, and none ever has the link for itself.
        """
        if self.host is None:
            return None
        return replace(self.host, bytes_per_second=self.host.bytes_per_second / self.gpus_per_host_link)

    def rate(self, dtype: str, m: float, n: float, k: float, groups: float = 1) -> float:
        """Return the operations a second of ``groups`` products of m x k with k x n in a training step.

        A row's rate over its shape's ``efficiency`` scales the efficiency of this shape:
        a mean of all rows, weighted by how near they are in the logarithms of the smallest dimension and of
        the number of operations, so that it is exact at a row, times the share of the clock that is
        sustained.
        """
        near = best = 0.0
        smallest, size = math.log(max(1.0, min(m, n, k))), math.log(max(1.0, m * n * k))
        around = self.around_loop.get(dtype, AROUND_LOOP)
        reached = efficiency(m, n, k, self.processors, around, groups) * self.sustained.get("clock", 1.0)
        for *shape, rate in self._rates(dtype):
            scale = rate / efficiency(*shape, self.processors, around)
            distance = (smallest - math.log(min(shape))) ** 2 + (size - math.log(math.prod(shape))) ** 2
            if distance < 1e-12:
                return reached * scale
            near += 1 / distance
            best += scale / distance
        return reached * best / near

    @property
    def multiplies_any_layout(self) -> bool:
        """Whether FP8 products read operands by rows or by columns, as from compute capability 10.0 on."""
        return "mxfp8" in (self.fp8_recipes or ())

    @property
    def half(self) -> str:
        """The format of products in half precision; fp32 where no rate of one is known."""
        return "bf16" if self.matrix_rates.get("bf16") else "fp32"

    def peak(self, dtype: str) -> float:
        """Return the rate whose full use is a utilisation of 1."""
        return self.peak_rates.get(dtype) or max(row[3] for row in self._rates(dtype))

    def _rates(self, dtype: str) -> Sequence[Sequence[float]]:
        rows = self.matrix_rates.get(dtype) or ()
        if not rows:
            dtypes = " and ".join(name for name in DTYPES if self.matrix_rates.get(name))
            raise ValueError(f"system {self.name} has no matrix rate for {dtype}, only {dtypes}: add rows")
        return rows

    def link(self, ranks: int, stride: int) -> Link:
        """Return one GPU's share of the links in a group of ``ranks`` that are ``stride`` ranks apart.

        A group within a node is as fast as the node.  In a group across nodes, members on one node use
        all of their network links together, since rings run through every link, and all the time.
        """
        sharing = self.in_a_node(ranks, stride)
        if sharing == ranks:
            return self.node
        rate = min(self.node.bytes_per_second, sharing * self.network.bytes_per_second)
        return Link(rate, self.network.latency_seconds)

    @property
    def between_nodes(self) -> Link:
        """One GPU's share of the network, at the rate that single messages sustain."""
        rate = self.network.bytes_per_second * self.sustained.get("network", 1.0)
        return Link(rate, self.network.latency_seconds)

    def message_link(self, ranks: int, stride: int) -> Link:
        """Return the slowest link between the neighbours of a line of ``ranks``, ``stride`` ranks apart."""
        return self.node if self.in_a_node(ranks, stride) == ranks else self.between_nodes

    def all_reduce_seconds(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes a rank, measured or else around a ring."""
        if ranks < 2 or size <= 0:
            return 0.0
        measured = self._measured(self.all_reduce, size, ranks, stride)
        return 2 * self._ring(size, ranks, stride) if measured is None else measured

    def gather_seconds(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of an all-gather into, or a reduce-scatter of, ``size`` bytes a rank.

        Where neither was measured, it is half an all-reduce.
        """
        if ranks < 2 or size <= 0:
            return 0.0
        measured = self._measured(self.gather, size, ranks, stride)
        return self.all_reduce_seconds(size, ranks, stride) / 2 if measured is None else measured

    def all_to_all_seconds(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds in which every rank sends its ``size`` bytes in equal parts to all ranks.

        Parts for ranks of the same node take its links, the others the rank's own share of the network, both
        at the same time.
        """
        if ranks < 2 or size <= 0:
            return 0.0
        measured = self._measured(self.all_to_all, size, ranks, stride)
        if measured is not None:
            return measured
        near = self.in_a_node(ranks, stride)
        links = [(near - 1, self.node), (ranks - near, self.between_nodes)]
        return max(link.seconds(size * peers / ranks) for peers, link in links if peers)

    def _measured(self, rows: Sequence[Collective], size: float, ranks: int, stride: int) -> float | None:
        """Return the seconds that ``rows`` have for a group within a node, or None."""
        sizes = sorted((row[1], row[2]) for row in rows if row[0] == ranks)
        if not sizes or self.in_a_node(ranks, stride) < ranks:
            return None
        last, seconds = sizes[-1]
        return seconds * size / last if size > last else interpolated(sizes, size)

    def _ring(self, size: float, ranks: int, stride: int) -> float:
        """A part of the tensor goes to all members but one, into each other node once."""
        steps = ranks - 1
        between = math.ceil(ranks / self.in_a_node(ranks, stride)) - 1
        latency = between * self.network.latency_seconds + (steps - between) * self.node.latency_seconds
        return latency + size * steps / ranks / self.link(ranks, stride).bytes_per_second

    @property
    def domain(self) -> int:
        """The GPUs that the links of ``node`` join."""
        return self.gpus_per_domain or self.gpus_per_node

    def in_a_node(self, ranks: int, stride: int) -> int:
        """Return how many of a group's ``ranks``, ``stride`` apart, the links of ``node`` join.

        Jobs fill as few domains as they can with equally many ranks in each.
        """
        if (ranks - 1) * stride < self.domain:
            return ranks
        joined = min(ranks, max(1, self.domain // stride))
        return joined if self.domain == self.gpus_per_node else ranks // math.ceil(ranks / joined)

    def to_json(self) -> str:
        """Return the description in the form that ``read`` reads."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> Self:
        """Return the system that ``text`` describes; ValueError, naming ``source``, for anything else."""
        with naming(source):
            return parse_as(cls, text, "write what mpp calibrate writes")


def shipped() -> tuple[str, ...]:
    """Return the names of the systems that come with this package."""
    return tuple(sorted(file.name.removesuffix(".json") for file in _SHIPPED.iterdir()))


_BY_DEVICE = {
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB200": "gb200",
    "NVIDIA GB300": "gb300",
    "AMD Instinct MI300X": "mi300x",
}
"""The shipped systems by their drivers' names.  Boards with another peak rate have others, as an H100 NVL."""

_OF_SAME_PEAK = {"NVIDIA A100 80GB PCIe": "NVIDIA A100-SXM4-80GB"}
"""Devices with the data sheet's rates of a shipped system and other links and clocks under load."""


def of_device(device: str) -> System | None:
    """Return the shipped system of a ``device``, named as its driver does; None where there is none."""
    return read(_BY_DEVICE[device]) if device in _BY_DEVICE else None


def peak_of_device(device: str, dtype: str) -> float | None:
    """Return the operations a second on the data sheet of a ``device``, named as its driver does, or None."""
    system = of_device(_OF_SAME_PEAK.get(device, device))
    return None if system is None else system.peak_rates.get(dtype)


def read(name: str) -> System:
    """Return the system ``name``, which is a shipped one's name or a path; ValueError if it is neither."""
    if name.lower() in shipped():
        # Tests have checked it, and the check takes longer than many a command.
        content = json.loads((_SHIPPED / f"{name.lower()}.json").read_text(encoding="utf-8"))
        links = {name: Link(**content[name]) for name in ("node", "network", "host") if name in content}
        return System(**{**content, **links})
    if not Path(name).is_file():
        guess = did_you_mean(name.lower(), shipped())
        hint = f" ({guess})" if guess else ""
        raise ValueError(
            f"--system {name} is neither a file nor known{hint}: give one of {', '.join(shipped())}, "
            "or a JSON written by mpp calibrate"
        )
    try:
        return System.from_json(read_text(Path(name)), name)
    except UnicodeDecodeError:
        raise ValueError(f"{name}: not a text: write what mpp calibrate writes") from None
