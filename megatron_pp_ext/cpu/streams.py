"""Streams, events, memory counters and ranges of a device that has none.

A CPU finishes each operation before the next one starts, so waiting for a stream is always over already and
every stub below may return at once. Events are the exception: Megatron times with them, so they hold a clock.
"""

import collections
import contextlib
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch


class Stream:
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
        """The lowest and the highest priority: there is one."""
        return (0, 0)

    def synchronize(self) -> None:
        """Nothing is under way."""

    def wait_stream(self, stream: "Stream") -> None:
        """Nothing is under way there either."""

    def wait_event(self, event: "Event") -> None:
        """What the event marks has happened."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Mark now."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """All work is done."""
        return True

    def is_capturing(self) -> bool:
        """No graph is being recorded."""
        return False


class Event:
    """A point in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Note the time."""
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from here to ``end``, as torch.cuda.Event counts them."""
        return 1000.0 * (end.seconds - self.seconds)

    def wait(self, stream: Stream | None = None) -> None:
        """What it marks has happened."""

    def query(self) -> bool:
        """What it marks has happened."""
        return True

    def synchronize(self) -> None:
        """What it marks has happened."""


class Device:
    """``with torch.cuda.device(0)``: the one device is always the current one."""

    def __init__(self, device: Any = 0) -> None:
        self.idx = 0

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass


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
    """Replace what torch.cuda offers beside tensors."""
    replacements: dict[str, Any] = {
        # Megatron refuses to start without a device, and with a count of 0 it skips, without a word, the
        # set-up of its process groups.
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
    # torch.accelerator reads torch.cuda.is_available. It has to go on saying that there is none, or torch's
    # optimizers look for a CUDA graph under way and DataLoader pins memory.
    torch.accelerator.is_available = lambda: False
