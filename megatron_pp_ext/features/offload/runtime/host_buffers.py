"""Pinned memory of the host, and the copy engines that move activations to it and back."""

import weakref
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megatron_pp_ext.setting_error import SettingError

PARTS = 8
"""The sizes of buffers between one power of two and the next: at most an eighth of a buffer is not used."""


class Completion(Protocol):
    """The end of a copy."""

    def wait(self) -> None:
        """Let later work on the device wait for it; the host goes on."""

    def synchronize(self) -> None:
        """Let the host wait for it."""


@dataclass(slots=True, eq=False)
class _Region:
    """Memory that was pinned at once, of which the first ``cut`` bytes are buffers.

    ``used`` of them are taken.  ``last_use`` is that of the buffer which was given back last, as number
    ``returned`` of all.
    """

    memory: torch.Tensor
    cut: int = 0
    used: int = 0
    last_use: Completion | None = None
    returned: int = 0


@dataclass(slots=True, eq=False)
class HostBuffer:
    """A buffer of bytes; ``last_use`` is the copy to the device that was the last to read it, if any."""

    memory: torch.Tensor
    region: _Region
    last_use: Completion | None = None


class HostBuffers:
    """At most ``limit`` bytes of pinned memory, which it takes as they are needed and keeps.

    Sizes are rounded up, so that buffers fit again where sizes differ a little, as those of experts do.  A
    region that has no buffer in use serves other sizes.  Where the limit needs it, such regions are released,
    the least recently used first.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.pinned_bytes, self.used_bytes = limit, 0, 0
        self._regions: list[_Region] = []
        self._free: defaultdict[int, deque[HostBuffer]] = defaultdict(deque)  # by size, the oldest first
        self._returned = 0

    def reserve(self, size: float) -> None:
        """Pin ``size`` bytes at once, as far as the limit allows; buffers are cut from these first."""
        most = int(min(size, self.limit - self.pinned_bytes))
        if most > 0:
            self._pin(most)

    def take(self, size: int) -> HostBuffer | None:
        """Return a buffer of ``size`` bytes or more; None where that would exceed the limit."""
        size = _rounded(size)
        if self._free[size]:
            buffer = self._free[size].popleft()  # whose last use is longest ago
        elif region := self._with_room(size):
            buffer = HostBuffer(region.memory[region.cut : region.cut + size], region, region.last_use)
            region.cut += size
        else:
            return None
        buffer.region.used += 1
        self.used_bytes += size
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Take back a buffer that nothing reads or writes once ``buffer.last_use`` has ended.

        Copies to the device end in the order in which their buffers are given back.
        """
        size, region = buffer.memory.nbytes, buffer.region
        self.used_bytes -= size
        self._returned += 1
        region.used -= 1
        region.last_use, region.returned = buffer.last_use, self._returned
        self._free[size].append(buffer)

    def _with_room(self, size: int) -> _Region | None:
        """Return a region of which ``size`` bytes are not cut; None where the limit allows no such."""
        cut = next((region for region in self._regions if region.memory.nbytes - region.cut >= size), None)
        if cut is not None:
            return cut
        unused = sorted(
            (region for region in self._regions if not region.used), key=lambda region: region.returned
        )
        large = next((region for region in unused if region.memory.nbytes >= size), None)
        if large is not None:
            self._forget_buffers(large)
            return large
        excess = self.pinned_bytes + size - self.limit
        if excess > sum(region.memory.nbytes for region in unused):
            return None
        while self.pinned_bytes + size > self.limit:
            self._release(unused.pop(0))
        return self._pin(size)

    def _forget_buffers(self, region: _Region) -> None:
        for free in self._free.values():
            remaining = [buffer for buffer in free if buffer.region is not region]
            free.clear()
            free.extend(remaining)
        region.cut = 0

    def _release(self, region: _Region) -> None:
        if region.last_use is not None:
            region.last_use.synchronize()  # the system may give the memory to somebody else
        self._forget_buffers(region)
        self._regions.remove(region)
        self.pinned_bytes -= region.memory.nbytes

    def _pin(self, size: int) -> _Region:
        region = _Region(_pinned(size))
        self.pinned_bytes += size
        self._regions.append(region)
        return region


def _rounded(size: int) -> int:
    step = max(1, (1 << (size - 1).bit_length()) // (2 * PARTS))
    return -(-size // step) * step


def _pinned(size: int) -> torch.Tensor:
    """Return ``size`` bytes that a device can copy to and from while its host goes on.

    Torch's own pinned memory comes in powers of two, up to twice the request.  SettingError where the
    system pins no more.
    """
    memory = torch.empty(size, dtype=torch.uint8)
    if torch.accelerator.is_available():
        runtime = torch.cuda.cudart()
        address = memory.data_ptr()
        if code := int(runtime.cudaHostRegister(address, size, 0)):
            raise SettingError(
                f"the system pins no {size} bytes more for activations on the host (error {code}): lower "
                "--pipeline-offload, or raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return memory


type Timed = AbstractContextManager[None]
"""A context in which a recorder notes the time."""


class Transfer(NamedTuple):
    """Bytes that go from ``source`` to ``target``; one of the two is pinned memory of the host."""

    source: torch.Tensor
    target: torch.Tensor


class CopyEngines(Protocol):
    """Copies between the device and its host."""

    def to_host(self, transfers: Sequence[Transfer], after: Iterable[Completion], timed: Timed) -> Completion:
        """Launch copies to the host, which start after all work launched so far and after ``after``.

        ``timed`` is entered where they begin and left where they end, in the stream that does them.
        """

    def to_device(
        self, transfers: Sequence[Transfer], after: Iterable[Completion], timed: Timed
    ) -> Completion:
        """Launch copies to the device, like ``to_host``."""

    def stream(self) -> Hashable:
        """Return the stream on which the caller computes."""


class CopyEvent:
    """The end of a copy on a stream; a ``Completion``."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        """See ``Completion``; it is the current stream that waits."""
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class CopyStreams:
    """The copy engines of this rank's device; ``CopyEngines``.

    A copy waits for all that was launched on the compute stream before it, and on its own stream.  What is
    computed later waits for a copy only where it has to (``Completion.wait``).  The host waits for nothing.
    """

    def __init__(self) -> None:
        self._to_host, self._to_device = torch.cuda.Stream(), torch.cuda.Stream()

    def to_host(self, transfers: Sequence[Transfer], after: Iterable[Completion], timed: Timed) -> CopyEvent:
        return _launch(self._to_host, transfers, after, timed)

    def to_device(
        self, transfers: Sequence[Transfer], after: Iterable[Completion], timed: Timed
    ) -> CopyEvent:
        return _launch(self._to_device, transfers, after, timed)

    def stream(self) -> Hashable:
        return torch.cuda.current_stream()


def _launch(
    stream: torch.cuda.Stream, transfers: Sequence[Transfer], after: Iterable[Completion], timed: Timed
) -> CopyEvent:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for event in after:
            event.wait()
        with timed:
            for source, target in transfers:
                target.copy_(source, non_blocking=True)
        return CopyEvent(stream)
