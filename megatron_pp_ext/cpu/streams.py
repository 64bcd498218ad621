"""Streams, events, memory counters and ranges for a device that has none.

A CPU finishes each operation before the next one starts, so there is never anything to wait for, and every
stub of torch.cpu and below may return at once. Events hold the time, since Megatron measures with them.
"""

import collections
import contextlib
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch


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


def install() -> None:
    """Replace the functions and classes of torch.cuda that have no tensors."""
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
