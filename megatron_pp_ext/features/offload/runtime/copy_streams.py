"""The copy engines of a device: one each way, each with a stream of its own.

A copy waits for all that was launched on the compute stream before it, and on its own stream.  What is
computed later waits for a copy only where it has to (``Completion.wait``).  The host waits for nothing.
"""

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from megatron_pp_ext.features.offload.runtime.host_buffers import Completion

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
    """The copy engines of this rank's device; ``CopyEngines``."""

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
