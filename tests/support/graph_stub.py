"""CUDA graphs on a CPU, where a wrong order of replays and an early reuse of memory give wrong numbers.

``install`` replaces ``torch.cuda.CUDAGraph`` and ``torch.cuda.graph``.  As on a GPU:

- What a capture allocates comes from the graph's pool (best fit, split and merged) and goes back when its
  last reference goes, in Python, C++ or autograd, within a capture or between two.
- A capture computes nothing: its floating-point results are NaN until a replay, and what it wrote to memory
  of others is put back.  A replay runs the recorded operations on the same addresses.
- ``.item()`` and shapes that depend on data are refused within a capture.

Stricter than a GPU: a block becomes NaN where its death was recorded, or at the start of the next graph of
its pool if it died between two captures.  ``Pool.kill`` makes a whole pool NaN.

Other than on a GPU: there is one stream, so no race and no late message; collectives are not recorded
properly; generators are registered without effect, and a replay draws from the CPU's; what a graph reads from
memory of others is kept alive.  Integers have values in a capture, else an index computed there would be out
of range in the next one.

``tensor.is_cuda`` has to be true (``engine_checkout``), else Transformer Engine's ``make_weak_ref`` keeps
every tensor, nothing is reused and any order is right.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ALIGNMENT = 512
NAN_BYTE = 255
"""All bytes of this value are a NaN in every floating-point format."""


class Operation(NamedTuple):
    """A recorded operation and the tensors in which its results belong."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list[torch.Tensor | None]

    def run(self) -> None:
        values = tree_leaves(self.function(*self.args, **self.kwargs))
        for result, value in zip(self.results, values, strict=False):
            if result is not None:
                result.copy_(value)


class Death(NamedTuple):
    """The end of a block of memory."""

    block: torch.Tensor

    def run(self) -> None:
        if Pool.poisons:
            self.block.fill_(NAN_BYTE)


class Pool:
    """Memory of graphs, which is also the handle of it; ``size`` bytes of addresses, used as needed."""

    poisons: ClassVar[bool] = True
    """Whether dead blocks become NaN."""
    all: ClassVar["weakref.WeakSet[Pool]"] = weakref.WeakSet()

    def __init__(self, size: int = 1 << 27) -> None:
        whole = np.empty(size + ALIGNMENT, np.uint8)
        self.bytes = whole[-whole.ctypes.data % ALIGNMENT :][:size]
        self.memory = torch.from_numpy(self.bytes)
        self._free = {0: size}
        self._used = self._top = 0
        self.peak = 0
        """The most bytes that were in use at once."""
        self.deaths: list[Operation | Death] = []
        """Blocks that died since the last capture in this pool."""
        Pool.all.add(self)

    def take(self, size: int) -> np.ndarray:
        """Return a block of ``size`` bytes, which is the pool's again when nothing refers to it.

        Of the blocks that fit equally well it is the one freed last: the lowest address on a GPU.
        """
        size = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        fitting = (start for start in reversed(self._free) if self._free[start] >= size)
        start = min(fitting, key=lambda start: self._free[start])
        rest = self._free.pop(start) - size
        if rest:
            self._free[start + size] = rest
        self._used += size
        self.peak, self._top = max(self.peak, self._used), max(self._top, start + size)
        block = self.bytes[start : start + size]
        if not self.captures:  # a static buffer, which is alive when the next graph starts
            self.deaths = [
                death
                for death in self.deaths
                if not (isinstance(death, Death) and np.shares_memory(death.block.numpy(), block))
            ]
        weakref.finalize(block, self._give, start, size).atexit = False
        return block

    def _give(self, start: int, size: int) -> None:
        events = Graph.capturing.events if self.captures and Graph.capturing else self.deaths
        events.append(Death(self.memory[start : start + size]))
        self._used -= size
        size += self._free.pop(start + size, 0)
        before = next((other for other, free in self._free.items() if other + free == start), start)
        self._free[before] = self._free.pop(before, 0) + size

    @property
    def captures(self) -> bool:
        """Whether a graph of this pool is being captured."""
        return Graph.capturing is not None and Graph.capturing.memory is self

    def kill(self) -> None:
        """Make all of it NaN: nobody may read it before it is written again."""
        self.bytes[: self._top] = NAN_BYTE

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this pool."""
        return 0 <= tensor.untyped_storage().data_ptr() - self.bytes.ctypes.data < self.bytes.size


class Graph:
    """Stands in for ``torch.cuda.CUDAGraph``."""

    capturing: ClassVar["Graph | None"] = None
    replayed: ClassVar[int] = 0
    """The number of replays in this process."""

    def __init__(self, *unused: Any) -> None:
        self.memory: Pool | None = None
        self.events: list[Operation | Death] = []
        self.is_captured = False
        # Each graph has its own: Transformer Engine would take the CPU's generator for a GPU's.
        self.register_generator_state = lambda state: None

    def pool(self) -> Pool | None:
        return self.memory

    def reset(self) -> None:
        self.events, self.is_captured = [], False

    def replay(self) -> None:
        if not self.is_captured or Graph.capturing is not None:
            raise RuntimeError("a replay without a capture, or within one")
        Graph.replayed += 1
        with torch.no_grad():
            for event in self.events:
                event.run()


class Recording(TorchDispatchMode):
    """Places what operations return in the pool of ``graph``, and records them for it."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        assert graph.memory is not None
        self._pool, self._graph = graph.memory, graph
        self._before: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        recorded = tree_map(_unowned, (args, kwargs))
        writes = func._schema.is_mutable
        if writes:
            self._keep(map(_unowned, inputs))
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        results: list[torch.Tensor | None] = []

        def place(value: Any) -> Any:
            is_new = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in storages
            if is_new:
                value = self._placed(value)
            results.append(_unowned(value) if is_new else None)
            return value

        returned = tree_map(place, func(*args, **kwargs))
        if writes or any(result is not None for result in results):  # others make views
            self._graph.events.append(Operation(func, *recorded, results))
        return returned

    def _keep(self, tensors: Iterator[torch.Tensor]) -> None:
        """Keep the numbers of those outside of pools, which an operation may write to."""
        for tensor in tensors:
            if not any(pool.has(tensor) for pool in Pool.all):
                place = tensor.data_ptr(), tensor.size(), tensor.stride()
                self._before.setdefault(place, (tensor, tensor.clone()))

    def _placed(self, value: torch.Tensor) -> torch.Tensor:
        block = self._pool.take(value.untyped_storage().nbytes())
        block[:] = NAN_BYTE
        placed = _view(torch.from_numpy(block).untyped_storage(), value)
        if not value.is_floating_point():
            placed.copy_(value)
        return placed

    def undo(self) -> None:
        """Put back what operations wrote outside of pools."""
        for tensor, before in reversed(self._before.values()):
            tensor.copy_(before)


def _unowned(leaf: Any) -> Any:
    """Return a tensor of the same numbers at the same address, which does not keep a pool's block alive."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    pool = next((pool for pool in Pool.all if pool.has(leaf)), None)
    if pool is None:
        return _view(leaf.untyped_storage(), leaf)
    start = leaf.untyped_storage().data_ptr() - pool.bytes.ctypes.data
    return _view(pool.memory.untyped_storage(), leaf, start)


def _view(storage: Any, like: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return a tensor in ``storage``, of the layout of ``like``, whose storage begins ``start`` bytes in."""
    offset = start // like.element_size() + like.storage_offset()
    return torch.empty(0, dtype=like.dtype).set_(storage, offset, like.size(), like.stride())


@contextlib.contextmanager
def capture(
    cuda_graph: Graph, pool: Pool | None = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Stand in for ``torch.cuda.graph``."""
    if Graph.capturing is not None:
        raise RuntimeError("a capture within a capture")
    cuda_graph.memory = pool = pool or Pool()
    cuda_graph.events, pool.deaths = pool.deaths, []
    Graph.capturing = cuda_graph
    try:
        with Recording(cuda_graph) as recording:
            yield
        cuda_graph.is_captured = True
    finally:
        Graph.capturing = None
        recording.undo()


def _of_address(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let ``torch.as_tensor`` read the interface by which Transformer Engine makes a weak reference."""

    def as_tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, torch.Tensor) or not hasattr(data, "__cuda_array_interface__"):
            return stock(data, *args, **kwargs)
        like = torch.empty(data.shape, dtype=data.dtype)
        bytes_ = like.untyped_storage().nbytes()
        storage = torch._C._construct_storage_from_data_pointer(data.data_ptr(), like.device, bytes_)
        return _view(storage, like)

    return as_tensor


class Allocating(TorchDispatchMode):
    """Places what is allocated outside of a capture in a pool."""

    running: ClassVar[list["Allocating"]] = []

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket not in (torch.ops.aten.zeros, torch.ops.aten.empty):
            return result
        block = self._pool.take(result.untyped_storage().nbytes())
        return _view(torch.from_numpy(block).untyped_storage(), result).copy_(result)

    @staticmethod
    def begin(device: int, pool: Pool) -> None:
        """Stand in for ``torch._C._cuda_beginAllocateCurrentThreadToPool``."""
        Allocating.running.append(Allocating(pool).__enter__())

    @staticmethod
    def end(device: int, pool: Pool) -> None:
        """Stand in for ``torch._C._cuda_endAllocateToPool``."""
        Allocating.running.pop().__exit__(None, None, None)


def install(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace torch's graphs in this process; before Transformer Engine is imported, which binds a name."""
    replace(torch, "as_tensor", _of_address(torch.as_tensor))
    for name, stand_in in (
        ("CUDAGraph", Graph),
        ("graph", capture),
        ("graph_pool_handle", Pool),
        ("is_current_stream_capturing", lambda: Graph.capturing is not None),
    ):
        replace(torch.cuda, name, stand_in)
    for name, stand_in in (
        ("_graph_pool_handle", Pool),
        ("_cuda_beginAllocateCurrentThreadToPool", Allocating.begin),
        ("_cuda_endAllocateToPool", Allocating.end),
    ):
        setattr(torch._C, name, stand_in)  # a CPU's torch has none of them


def permit_local_graphs(cuda_graphs: Any, replace: Callable[[Any, str, Any], None]) -> None:
    """Let Megatron's module ``cuda_graphs`` capture although no generator is a GPU's."""
    replace(cuda_graphs, "_ensure_generator_state_is_cudagraph_safe", lambda generator: generator)
    replace(torch.cuda, "default_generators", torch.cuda.default_generators[:1] * 16)
