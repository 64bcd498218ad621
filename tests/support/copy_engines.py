"""Copy engines of machines without a device: at once, or on threads that take their time."""

import time
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_pp_ext.features.offload.runtime.host_buffers import Completion, Timed, Transfer


class Threads:
    """Copies on a thread each way, which take ``seconds_per_byte``, as on a link of that rate.

    Who waits for a copy waits with its host.  ``log`` has "out" or "back" with the bytes of each.
    """

    def __init__(self, seconds_per_byte: float = 0.0) -> None:
        self._out, self._back = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._seconds_per_byte = seconds_per_byte
        self.log: list[tuple[str, int]] = []

    def to_host(self, transfers: Sequence[Transfer], after: Iterable[Completion], timed: Timed) -> "OnThread":
        return self._launch("out", self._out, transfers, list(after), timed)

    def to_device(
        self, transfers: Sequence[Transfer], after: Iterable[Completion], timed: Timed
    ) -> "OnThread":
        return self._launch("back", self._back, transfers, list(after), timed)

    def stream(self) -> Hashable:
        return None

    def _launch(
        self,
        way: str,
        thread: ThreadPoolExecutor,
        transfers: Sequence[Transfer],
        after: list[Completion],
        timed: Timed,
    ) -> "OnThread":
        size = sum(transfer.source.nbytes for transfer in transfers)
        self.log.append((way, size))
        remaining = list(transfers)

        def copy() -> None:
            for event in after:
                event.wait()
            with timed:
                start = time.perf_counter()
                while remaining:  # so that nothing holds the memory once the copy is done
                    _copy(remaining.pop())
                time.sleep(max(0.0, self._seconds_per_byte * size - (time.perf_counter() - start)))

        return OnThread(thread.submit(copy))


def _copy(transfer: Transfer) -> None:
    transfer.target.copy_(transfer.source)


class OnThread:
    """The end of a copy."""

    def __init__(self, copy: Future[None]) -> None:
        self._copy = copy

    def wait(self) -> None:
        self._copy.result()

    def synchronize(self) -> None:
        self._copy.result()
