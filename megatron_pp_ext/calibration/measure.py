"""Measurements of one rank; all ranks run them at the same time, as they would in training."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp_ext.costs.system import Link

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SECONDS = 0.2
"""The seconds for which each product and copy is repeated."""

REPLAYED = 10
"""The times that a graph has a kernel, so that starting the graph costs little."""

FAST_FRACTION = 0.5
"""All shapes of a number format are measured if the device has this fraction of its fp32 rate, or more."""

CPU_SHAPES = (
    (128, 128, 128),
    (64, 1024, 1024),
    (256, 256, 256),
    (1024, 128, 1024),
    (512, 512, 512),
    (256, 1024, 1024),
    (1024, 1024, 1024),
)
GPU_SHAPES = (
    (512, 512, 512),
    (128, 4096, 4096),
    (1024, 1024, 1024),
    (4096, 128, 4096),
    (2048, 2048, 2048),
    (1024, 8192, 8192),
    (4096, 4096, 4096),
    (8192, 1024, 8192),
    (8192, 8192, 8192),
)
"""Shapes (m, n, k) of products m x k with k x n: cubes, and thin ones as under tensor parallelism."""

ATTENTION_WIDTH, ATTENTION_HEADS = 128, 16
CPU_LENGTHS, GPU_LENGTHS = (256, 1024), (1024, 8192)
"""The head's width and the heads, and the tokens of the two sequences, for which attention is timed."""

HOST_BYTES = 2**28
"""The bytes of a copy to the host, which has reached its rate then."""

REDUCED_BYTES = (2**12, 2**16, 2**20, 2**24, 2**26)
MESSAGE_BYTES = 2**24

COLLECTIVES = ("all_reduce", "gather", "all_to_all")
"""The collectives that are timed, by the names that a system has for them."""

type Rows = list[tuple[float, ...]]


def shapes(device: torch.device) -> Sequence[tuple[int, int, int]]:
    """Return the shapes of the products to time on ``device``."""
    return GPU_SHAPES if device.type == "cuda" else CPU_SHAPES


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all that was launched on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of ``action``, the median of at least three batches of repetitions."""
    action()
    synchronize(device)
    repeated, batches = 1, list[float]()
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(batches) < 3:
        start = time.perf_counter()
        for _ in range(repeated):
            action()
        synchronize(device)
        batches.append((time.perf_counter() - start) / repeated)
        # A batch takes a tenth of the whole, so that the clock and the device's queue cost little.
        repeated = max(1, int(SECONDS / 10 / batches[-1]))
    return median(batches)


def kernel_seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the kernels of ``action``, without the time that the host takes to start them.

    A GPU replays them from a graph: its host takes some ten microseconds for a product, in which the device
    has done a small one long ago.
    """
    if device.type != "cuda":
        return seconds_of(action, device)
    action()  # makes handles and workspaces, which a graph cannot
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYED):
            action()
    return seconds_of(graph.replay, device) / REPLAYED


def matrix_rate(dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device) -> float:
    """Return the operations a second of a product (m, n, k), which has 2 m n k of them."""
    m, n, k = shape
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(k, n, device=device).to(dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    return 2 * m * n * k / kernel_seconds_of(lambda: torch.mm(a, b, out=out), device)


def matrix_rates(device: torch.device) -> Iterator[tuple[str, Rows]]:
    """Yield for each number format its rows of (m, n, k, operations a second).

    A format in which the device is slow has a single row: more of them would take minutes, and none would
    leave a model in this format without an estimate.
    """
    probe = shapes(device)[2]
    plain = matrix_rate(torch.float32, probe, device)
    for name, dtype in DTYPES.items():
        rate = plain if dtype is torch.float32 else matrix_rate(dtype, probe, device)
        if rate < FAST_FRACTION * plain:
            yield name, [(*probe, rate)]
        else:
            yield name, [(*shape, matrix_rate(dtype, shape, device)) for shape in shapes(device)]


def attention_rates(device: torch.device) -> Rows:
    """Return a row of (width of a head, operations a second, keys) of the forward of causal attention.

    A query takes as long as it would for so many keys more than it sees; that and the rate follow from the
    seconds for two lengths.
    """
    lengths = GPU_LENGTHS if device.type == "cuda" else CPU_LENGTHS
    short, long = ((length, _attention(length, device) / length) for length in lengths)
    per_key = (long[1] - short[1]) / ((long[0] - short[0]) / 2)
    if per_key <= 0:
        return []
    around = max(1.0, short[1] / per_key - short[0] / 2)
    return [(float(ATTENTION_WIDTH), 4 * ATTENTION_WIDTH * ATTENTION_HEADS / per_key, around)]


def _attention(length: int, device: torch.device) -> float:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (1, ATTENTION_HEADS, length, ATTENTION_WIDTH)
    queries, keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    return kernel_seconds_of(lambda: attend(queries, keys, values, is_causal=True), device)


def copy_rate(device: torch.device) -> float:
    """Return the bytes a second of a copy within the device's memory, those read plus those written."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)


def host_link(device: torch.device) -> Link:
    """Return the link to pinned memory of the host, from the seconds of a tiny copy and of a large one.

    They go both ways at once, on a stream each, as in a training step; the rate is that of
    one way.
    """
    latency = _both_ways(1, device)
    return Link(HOST_BYTES / max(_both_ways(HOST_BYTES, device) - latency, 1e-9), latency)


def _both_ways(size: int, device: torch.device) -> float:
    return seconds_of(copies_both_ways(size, device), device)


def copies_both_ways(size: int, device: torch.device) -> Callable[[], None]:
    """Return a function that copies ``size`` bytes to the host's pinned memory and back."""
    on_device = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    ways = [(torch.cuda.Stream(), on_host[0], on_device[0]), (torch.cuda.Stream(), on_device[1], on_host[1])]

    def start() -> None:
        for stream, target, source in ways:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    return start


def launch_seconds(device: torch.device) -> float:
    """Return the seconds that it takes to start a kernel, from one that has next to nothing to do."""
    number = torch.zeros(1, device=device)
    return seconds_of(lambda: number.add_(1.0), device)


def message(device: torch.device) -> Link:
    """Return the link of ranks 0 and 1, from halves of the round trips of a tiny and of a large message."""
    latency = _round_trip(4, 50, device) / 2
    seconds = _round_trip(MESSAGE_BYTES, 8, device) / 2
    return Link(MESSAGE_BYTES / max(seconds - latency, 1e-9), latency)


def _round_trip(size: int, count: int, device: torch.device) -> float:
    tensor, rank = torch.zeros(size // 4, device=device), dist.get_rank()

    def there_and_back() -> None:
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    return _median_of(count, there_and_back, device)


def group_sizes(world: int) -> list[int]:
    """Return the powers of 2 below ``world``, and ``world``."""
    return [*takewhile(lambda ranks: ranks < world, (2**power for power in range(1, 20))), world]


def collectives(device: torch.device) -> Iterator[dict[str, Rows]]:
    """Yield rows of (ranks, bytes, seconds) by the kind of collective for each size of a group.

    There are none on ranks that are not in it.
    """
    for ranks in group_sizes(dist.get_world_size()):
        group = dist.new_group(range(ranks))
        rows: dict[str, Rows] = {}
        if dist.get_rank() < ranks:
            rows = {
                kind: [
                    (float(ranks), float(size), _collective(kind, size, group, device))
                    for size in REDUCED_BYTES
                ]
                for kind in COLLECTIVES
            }
        dist.barrier()
        yield rows


def _collective(kind: str, size: int, group: Any, device: torch.device) -> float:
    ranks = dist.get_world_size(group)
    whole = torch.zeros(size // 4 // ranks * ranks, device=device)
    part, other = whole.new_zeros(len(whole) // ranks), torch.empty_like(whole)
    actions: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return _median_of(max(3, min(20, 2**24 // size)), actions[kind], device)


def _median_of(count: int, action: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of ``count`` times ``action``, after two that do not count.

    All ranks of a collective give the same ``count``; ``seconds_of`` would repeat as measured on each rank.
    """
    times = []
    for _ in range(count + 2):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[2:])
