"""A device whose streams take their time, for a machine that has none.

As with a GPU the host launches work and goes on.  Work begins when it has been launched and what stands
before it on its stream has ended, and lasts for the requested time; the numbers themselves are computed by
the CPU at the launch.  The host sleeps where it waits for the device: at a stream's or an event's
``synchronize``, and before a message leaves.  Waiting for a message stops the host, as gloo does.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp_ext.cpu import torch_stubs


class Stream(torch_stubs.Stream):
    """A queue of work that ends at ``free_at``, in seconds of ``time.perf_counter``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.free_at = 0.0
        _all.append(self)

    def run(self, seconds: float) -> None:
        """Launch work that takes ``seconds``."""
        self.free_at = max(self.free_at, time.perf_counter()) + seconds

    def synchronize(self) -> None:
        """Sleep until all work is done."""
        _sleep_until(self.free_at)

    def wait_stream(self, stream: torch_stubs.Stream) -> None:
        """Let later launches begin after the work that ``stream`` has now."""
        assert isinstance(stream, Stream)
        self.free_at = max(self.free_at, stream.free_at)

    def wait_event(self, event: torch_stubs.Event) -> None:
        """Let later launches begin after ``event``."""
        self.free_at = max(self.free_at, event.seconds)

    def record_event(self, event: torch_stubs.Event | None = None) -> torch_stubs.Event:
        """Let ``event``, or a new one, be at the end of the work that is here now, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether all work is done."""
        return self.free_at <= time.perf_counter()


class Event(torch_stubs.Event):
    """The end of a stream's work at the time when the event was recorded."""

    def record(self, stream: torch_stubs.Stream | None = None) -> None:
        """Be at the end of what ``stream``, or the current one, has to do now."""
        stream = stream or current_stream()
        assert isinstance(stream, Stream)
        self.seconds = stream.free_at

    def wait(self, stream: torch_stubs.Stream | None = None) -> None:
        """Let what ``stream``, or the current one, runs next begin after this event."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return whether the event is over."""
        return self.seconds <= time.perf_counter()

    def synchronize(self) -> None:
        """Sleep until the event is over."""
        _sleep_until(self.seconds)


_all: list[Stream] = []
_current = [Stream()]
"""The default stream, and those that contexts have made the current one."""


def current_stream(device: Any = None) -> Stream:
    """Return the stream on which work is launched now."""
    return _current[-1]


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Launch work on ``stream`` within the context; None changes nothing."""
    _current.append(stream or current_stream())
    try:
        yield
    finally:
        _current.pop()


def synchronize(device: Any = None) -> None:
    """Sleep until all streams have done their work."""
    for stream in _all:
        stream.synchronize()


def install() -> None:
    """Put the device in the place of torch.cuda's streams and events, in this process."""
    for name, replacement in {
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: _current[0],
        "synchronize": synchronize,
    }.items():
        setattr(torch.cuda, name, replacement)
    dist.ProcessGroup.send = _behind_the_stream(dist.ProcessGroup.send)  # type: ignore[method-assign]


def _behind_the_stream(send: Callable[..., Any]) -> Callable[..., Any]:
    def send_later(*args: Any) -> Any:
        current_stream().synchronize()
        return send(*args)

    return send_later


def _sleep_until(seconds: float) -> None:
    time.sleep(max(0.0, seconds - time.perf_counter()))
