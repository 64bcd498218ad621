"""Stubs of torch.cuda on a CPU: tensors, random state, streams, events and memory counters."""

import collections
import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader

# fmt: off
FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like",
    "hann_window", "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor",
    "tril_indices", "triu_indices", "zeros", "zeros_like",
)
# fmt: on
TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def on_cpu(device: Any) -> Any:
    """Translate a device as Megatron writes it ("cuda", "cuda:1", an index, torch.device) to the CPU."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return "cpu"  # a bare number is a CUDA index: what torch.cuda.current_device() returns
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] == "cuda" else device
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    return device


def redirected(
    function: Callable[..., Any],
    name: str,
    translate: Callable[[Any], Any],
    at: int | None = None,
    drops: Collection[str] = (),
) -> Callable[..., Any]:
    """Wrap a function whose argument ``name``, which may also come at place ``at``, is to be translated.

    It does not get the keyword arguments that it ``drops``.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if at is not None and len(args) > at:
            args = (*args[:at], translate(args[at]), *args[at + 1 :])
        keywords = {name: value for name, value in kwargs.items() if name not in drops}
        if name in keywords:
            keywords[name] = translate(keywords[name])
        return function(*args, **keywords)

    return call


def _type_as_on_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``tensor.type()`` return "torch.cuda.FloatTensor".

    Megatron's optimizers and its gradient clipping sort parameters by that name and raise for a CPU tensor.
    """

    @functools.wraps(original)
    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = original(self)
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return type_name


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``.cuda()`` and ``.pin_memory()``: the tensor is where it should be."""
    return self


def redirect_devices() -> None:
    """Wrap the factories, the moves and ``Tensor.type``.

    The functions that take a device are wrapped one by one. A ``TorchFunctionMode`` would catch them all with
    less code, but it belongs to one thread and costs Python time in every torch call, which would blur what
    the benchmarks measure on a CPU.
    """
    for names, holder in ((FACTORIES, torch), (TENSOR_FACTORIES, torch.Tensor)):
        for name in names:
            # Pinning is a property of memory that a GPU reads.
            redirected_factory = redirected(getattr(holder, name), "device", on_cpu, drops=("pin_memory",))
            setattr(holder, name, redirected_factory)
    replacements: dict[str, Any] = {
        "to": redirected(torch.Tensor.to, "device", on_cpu, at=1),
        "type": _type_as_on_gpu(torch.Tensor.type),
        "cuda": _stay,
        "pin_memory": _stay,
        "record_stream": lambda self, stream: None,
    }
    for name, replacement in replacements.items():
        setattr(torch.Tensor, name, replacement)
    module = torch.nn.Module
    module.to = redirected(module.to, "device", on_cpu, at=1)  # type: ignore[method-assign]
    torch.load = redirected(torch.load, "map_location", on_cpu, at=1)


def _get_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _seed_all(seed: int) -> None:
    """Do nothing: torch.manual_seed calls this after it has seeded the CPU generator."""


def _give_data_loaders_generators() -> None:
    """Give each new DataLoader that has no generator one with the CPU generator's seed."""
    original = DataLoader.__init__

    @wraps(original)
    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(torch.initial_seed())

    DataLoader.__init__ = init  # type: ignore[method-assign]


def share_generator() -> None:
    """Point torch.cuda's random functions at the CPU generator, and let data loaders leave it alone.

    Tensors are on the CPU, so dropout and initialization draw from the CPU generator whatever Megatron saves,
    seeds and restores. Letting torch.cuda's calls reach that generator keeps Megatron's tracker of per-rank
    states working. The price: the two generators that a GPU machine has are one here. Whatever draws from the
    CPU's would move dropout masks, so each data loader draws the seeds of its workers from a generator of its
    own; a run resumed with dropout then has the masks of one that never stopped.
    """
    _give_data_loaders_generators()
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = _get_state  # type: ignore[attr-defined]
        module.set_rng_state = _set_state  # type: ignore[attr-defined]
        module.manual_seed = _seed  # type: ignore[attr-defined]
        module.manual_seed_all = _seed_all  # type: ignore[attr-defined]
    torch.cuda.default_generators = (torch.default_generator,)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_about_the_shared_generator)


def _not_about_the_shared_generator(record: logging.LogRecord) -> bool:
    """Drop the tracker's warning, one a dropout, that the CPU state moved while it held the GPU's."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


class Stream(torch.cpu.Stream):
    """A queue that is always empty."""

    device = torch.device("cpu")
    device_index = 0
    stream_id = 0
    cuda_stream = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority, which are the same."""
        return (0, 0)

    def synchronize(self) -> None:
        """Return at once: nothing is under way."""

    def record_event(self, event: "Event | None" = None) -> "Event":  # type: ignore[override]
        """Record the present time in ``event`` or a new one, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Return that no graph is being recorded."""
        return False


class Event(torch.cpu.Event):
    """A point in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Record the present time."""
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this event to ``end``, as torch.cuda.Event does."""
        return 1000.0 * (end.seconds - self.seconds)


class Device(contextlib.nullcontext[None]):
    """Stands in for ``torch.cuda.device(0)`` as a context: the one device is always the current one."""

    idx = 0

    def __init__(self, device: Any = 0) -> None:
        super().__init__()


_STREAM = Stream()


def _stream(*args: Any, **kwargs: Any) -> Stream:
    return _STREAM


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


@contextlib.contextmanager
def _range(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="CPU (gloo)",
        major=0,
        minor=0,
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count() or 1,
    )


def stub_streams() -> None:
    """Replace the functions and classes of torch.cuda that have no tensors.

    A CPU finishes each operation before the next one starts, so there is never anything to wait for, and
    every stub of torch.cpu and below may return at once. Events hold the time, since Megatron measures with
    them.
    """
    replacements: dict[str, Any] = {
        # Megatron refuses to start without a device, and with a count of 0 it silently skips the set-up of
        # its process groups.
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "current_device": _zero,
        "set_device": _nothing,
        "device": Device,
        "init": _nothing,
        "_lazy_init": _nothing,
        "_lazy_call": lambda call, **kwargs: call(),
        "get_device_name": lambda device=None: "CPU (gloo)",
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": _properties,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: stream if stream is not None else _STREAM,
        "current_stream": _stream,
        "default_stream": _stream,
        "set_stream": _nothing,
        "synchronize": _nothing,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": _nothing,
        "ipc_collect": _nothing,
        "reset_peak_memory_stats": _nothing,
        "reset_max_memory_allocated": _nothing,
        "memory_stats": lambda device=None: collections.defaultdict(int),
        "memory_allocated": _zero,
        "max_memory_allocated": _zero,
        "memory_reserved": _zero,
        "max_memory_reserved": _zero,
        "device_memory_used": _zero,
        "mem_get_info": lambda device=None: (_properties().total_memory, _properties().total_memory),
        "utilization": _zero,
        "power_draw": _zero,
        "temperature": _zero,
        "clock_rate": _zero,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _zero)
    torch.cuda.nvtx.range = _range
    # torch.accelerator reads torch.cuda.is_available. It must keep reporting that there is none, or torch's
    # optimizers look for a CUDA graph that is being captured, and DataLoader pins memory.
    torch.accelerator.is_available = lambda: False
