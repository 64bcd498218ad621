"""The machines a model is to run on: how fast they multiply, copy and talk.

A description is JSON with the fields of ``System``, each figure with its source; some are shipped in
``planner/systems``.  Rates are what a well-tuned program reaches, not what a data sheet promises; peaks
only divide model operations into a utilisation.

    {"name": "h100", "gpus_per_node": 8, "memory_bytes": 8e10,
     "matrix_rates": {"bf16": [[8192, 8192, 8192, 7.2e14]]}, "copy_bytes_per_second": 3.35e12,
     "node": {"bytes_per_second": 3.7e11, "latency_seconds": 3.4e-6},
     "network": {"bytes_per_second": 5e10, "latency_seconds": 1.4e-5},
     "sources": {"memory_bytes": "data sheet"}}
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

DTYPES = ("bf16", "fp32", "fp8")
"""The number formats of ``matrix_rates``; fp16 counts as bf16."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction, one GPU's share: bytes a second, and the seconds that a message of no size takes."""

    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, size: float) -> float:
        """How long a message of ``size`` bytes takes."""
        return self.latency_seconds + size / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class System:
    """One kind of GPU, its nodes of ``gpus_per_node``, and the network between them.

    ``matrix_rates``: for each number format, rows of (m, n, k, operations a second) for a product of
    m x k with k x n.  ``peak_rates``: operations a second by data sheet, for the utilisation; where there
    is none, the best measured rate.  ``copy_bytes_per_second``: device memory, reading plus writing.
    ``all_reduce``: rows of (ranks, bytes, seconds) where it was measured; else a ring on the links is
    assumed.  ``sources`` says of each field where it was read or how it was measured.  ValueError for
    figures that are not above zero.
    """

    name: str
    gpus_per_node: int
    memory_bytes: float
    matrix_rates: Mapping[str, Sequence[Sequence[float]]]
    copy_bytes_per_second: float
    node: Link
    network: Link
    peak_rates: Mapping[str, float] = field(default_factory=dict)
    all_reduce: Sequence[Sequence[float]] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (
            ("gpus_per_node", self.gpus_per_node),
            ("memory_bytes", self.memory_bytes),
            ("copy_bytes_per_second", self.copy_bytes_per_second),
            ("node.bytes_per_second", self.node.bytes_per_second),
            ("network.bytes_per_second", self.network.bytes_per_second),
            *((f"peak_rates {dtype}", rate) for dtype, rate in self.peak_rates.items()),
        ):
            _require_positive(self.name, name, value)
        for name, link in (("node", self.node), ("network", self.network)):
            _require_positive(self.name, f"{name}.latency_seconds", link.latency_seconds, or_zero=True)
        if not self.matrix_rates.get("bf16") and not self.matrix_rates.get("fp32"):
            raise ValueError(f"system {self.name}: matrix_rates has neither bf16 nor fp32: give one a row")
        for dtype, rows in self.matrix_rates.items():
            if dtype not in DTYPES:
                known = ", ".join(DTYPES)
                raise ValueError(f"system {self.name}: matrix_rates has {dtype!r}: give one of {known}")
            _require_rows(self.name, f"matrix_rates {dtype}", rows, ("m", "n", "k", "operations_per_second"))
        _require_rows(self.name, "all_reduce", self.all_reduce, ("ranks", "bytes", "seconds"))

    def rate(self, dtype: str, m: float, n: float, k: float) -> float:
        """Operations a second of a product of m x k with k x n.

        Rows count by how near they are in the logarithms of the smallest dimension and of the number
        of operations, so that the answer is exact at a row and never beyond the best or worst.
        """
        near = best = 0.0
        smallest, size = math.log(max(1.0, min(m, n, k))), math.log(max(1.0, m * n * k))
        for *shape, rate in self._rates(dtype):
            distance = (smallest - math.log(min(shape))) ** 2 + (size - math.log(math.prod(shape))) ** 2
            if distance < 1e-12:
                return rate
            near += 1 / distance
            best += rate / distance
        return best / near

    def peak(self, dtype: str) -> float:
        """The rate by which a utilisation is counted."""
        return self.peak_rates.get(dtype) or max(row[3] for row in self._rates(dtype))

    def _rates(self, dtype: str) -> Sequence[Sequence[float]]:
        rows = self.matrix_rates.get(dtype) or ()
        if not rows:
            known = " and ".join(name for name in DTYPES if self.matrix_rates.get(name))
            raise ValueError(f"system {self.name} has no matrix rate for {dtype}, only {known}: add rows")
        return rows

    def link(self, ranks: int, stride: int) -> Link:
        """What one GPU has of the links in a group of ``ranks``, ``stride`` ranks apart.

        A group within a node is as fast as the node.  Across nodes, members that share a node share
        their network links too, since rings are laid through all of them.
        """
        if (ranks - 1) * stride < self.gpus_per_node:
            return self.node
        sharing = min(ranks, max(1, self.gpus_per_node // stride))
        rate = min(self.node.bytes_per_second, sharing * self.network.bytes_per_second)
        return Link(rate, self.network.latency_seconds)

    def all_reduce_seconds(self, size: float, ranks: int, stride: int = 1) -> float:
        """An all-reduce of ``size`` bytes a rank: as measured for as many ranks, else around a ring."""
        if ranks < 2 or size <= 0:
            return 0.0
        rows = sorted((row[1], row[2]) for row in self.all_reduce if row[0] == ranks)
        return _interpolated(rows, size) if rows else 2 * self._ring(size, ranks, stride)

    def gather_seconds(self, size: float, ranks: int, stride: int = 1) -> float:
        """An all-gather into, or a reduce-scatter of, ``size`` bytes a rank: half an all-reduce."""
        return self.all_reduce_seconds(size, ranks, stride) / 2

    def all_to_all_seconds(self, size: float, ranks: int, stride: int = 1) -> float:
        """Every rank sends its ``size`` bytes in equal parts to all of the group."""
        return self._ring(size, ranks, stride) if ranks > 1 and size > 0 else 0.0

    def _ring(self, size: float, ranks: int, stride: int) -> float:
        link = self.link(ranks, stride)
        steps = ranks - 1
        return steps * link.latency_seconds + size * steps / ranks / link.bytes_per_second

    def to_json(self) -> str:
        """The description as ``read`` reads it."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Self:
        """The description in ``text``; ValueError, naming ``where``, for anything else."""
        try:
            content = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error}): write what mpp calibrate writes") from None
        if not isinstance(content, dict):
            raise ValueError(f"{where}: is no object: write what mpp calibrate writes")
        known = [entry.name for entry in fields(cls)]
        for name in content:
            if name not in known:
                guess = get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"did you mean {guess[0]!r}?" if guess else f"known are {', '.join(known)}"
                raise ValueError(f"{where}: {name!r} is unknown: {hint}")
        try:
            links = {name: Link(**content[name]) for name in ("node", "network")}
            return cls(**{**content, **links})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: {error} does not fit: write the fields of a system") from None
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def shipped() -> tuple[str, ...]:
    """The names of the systems that come with this package."""
    folder = resources.files("megatron_pp_ext.planner") / "systems"
    return tuple(sorted(file.name.removesuffix(".json") for file in folder.iterdir() if ".json" in file.name))


def read(name: str) -> System:
    """The system that ``name`` says: a shipped one's name, or a path; ValueError if it is neither."""
    if name.lower() in shipped():
        file = resources.files("megatron_pp_ext.planner") / "systems" / f"{name.lower()}.json"
        return System.from_json(file.read_text(encoding="utf-8"), name)
    if not Path(name).is_file():
        guess = get_close_matches(name.lower(), shipped(), n=1, cutoff=0.5)
        hint = f" (did you mean {guess[0]!r}?)" if guess else ""
        raise ValueError(
            f"--system {name} is neither a file nor known{hint}: give one of {', '.join(shipped())}, "
            "or a JSON written by mpp calibrate"
        )
    try:
        return System.from_json(Path(name).read_text(encoding="utf-8"), name)
    except UnicodeDecodeError:
        raise ValueError(f"{name}: not a text: write what mpp calibrate writes") from None


def _interpolated(rows: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds for ``size`` bytes from rising (bytes, seconds): straight between rows, in proportion above."""
    if size <= rows[0][0]:
        return rows[0][1]
    for (low, before), (high, after) in pairwise(rows):
        if size <= high:
            return before + (after - before) * (size - low) / (high - low)
    return rows[-1][1] * size / rows[-1][0]


def _require_rows(where: str, name: str, rows: Sequence[Sequence[float]], columns: tuple[str, ...]) -> None:
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"system {where}: {name} has the row {list(row)}: give {', '.join(columns)}")
        for column, value in zip(columns, row, strict=True):
            _require_positive(where, f"{name} {column}", value)


def _require_positive(where: str, name: str, value: Any, or_zero: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (value == 0 and not or_zero):
        rule = "0 or more" if or_zero else "above 0"
        raise ValueError(f"system {where}: {name} is {value!r}, but must be a number {rule}: correct it")
