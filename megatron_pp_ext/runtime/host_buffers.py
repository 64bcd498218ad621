"""Memory of the host that the device copies to and from: pinned, and used again by size."""

import weakref
from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

import torch

PARTS = 8
"""The sizes of buffers between one power of two and the next: at most an eighth of a buffer is not used."""


class Done(Protocol):
    """The end of a copy."""

    def wait(self) -> None:
        """Let what is computed next wait for it; on a device the host goes on."""


@dataclass(slots=True, eq=False)
class HostBuffer:
    """A buffer of bytes; ``read`` is the copy to the device that was the last to read it, if any."""

    memory: torch.Tensor
    read: Done | None = None


class HostBuffers:
    """At most ``limit`` bytes of pinned memory, which it takes as they are needed and keeps.

    Sizes are rounded up, so that buffers fit again where sizes differ a little, as those of experts do.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.pinned_bytes, self.used_bytes = limit, 0, 0
        self._free: list[HostBuffer] = []  # by size

    def take(self, size: int) -> HostBuffer | None:
        """Return a buffer of ``size`` bytes or more; None where that would exceed the limit."""
        size = _rounded(size)
        at = bisect_left(self._free, size, key=_size)
        if at < len(self._free) and (_size(self._free[at]) == size or not self._has_room(size)):
            buffer = self._free.pop(at)
        elif self._has_room(size):
            buffer = HostBuffer(_pinned(size))
            self.pinned_bytes += size
        else:
            return None
        self.used_bytes += _size(buffer)
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Take back a buffer that nothing writes to, and nothing but ``buffer.read`` reads."""
        self.used_bytes -= _size(buffer)
        self._free.insert(bisect_left(self._free, _size(buffer), key=_size), buffer)

    def _has_room(self, size: int) -> bool:
        return self.pinned_bytes + size <= self.limit


def _size(buffer: HostBuffer) -> int:
    return buffer.memory.nbytes


def _rounded(size: int) -> int:
    step = max(1, (1 << (size - 1).bit_length()) // (2 * PARTS))
    return -(-size // step) * step


def _pinned(size: int) -> torch.Tensor:
    """Return ``size`` bytes that a device can copy to and from while its host goes on.

    Torch's own pinned memory comes in powers of two, up to twice of what is asked for.  MemoryError where the
    system pins no more.
    """
    memory = torch.empty(size, dtype=torch.uint8)
    if torch.accelerator.is_available():
        runtime = torch.cuda.cudart()
        address = memory.data_ptr()
        if code := int(runtime.cudaHostRegister(address, size, 0)):
            raise MemoryError(
                f"the system pins no {size} bytes more for activations on the host (error {code}): lower "
                "--pipeline-offload-host-bytes, or raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return memory
