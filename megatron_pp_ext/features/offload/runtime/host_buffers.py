"""Memory of the host that the device copies to and from: pinned, and used again by size."""

import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Protocol

import torch

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

    Torch's own pinned memory comes in powers of two, up to twice the request.  MemoryError where the
    system pins no more.
    """
    memory = torch.empty(size, dtype=torch.uint8)
    if torch.accelerator.is_available():
        runtime = torch.cuda.cudart()
        address = memory.data_ptr()
        if code := int(runtime.cudaHostRegister(address, size, 0)):
            raise MemoryError(
                f"the system pins no {size} bytes more for activations on the host (error {code}): lower "
                "--pipeline-offload, or raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return memory
