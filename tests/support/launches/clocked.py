"""The time of a pipeline's launches when waiting messages take processors from compute."""

from collections.abc import Sequence
from heapq import heappop, heappush

from tests.support.launches.entries import Batch, Collective, Kernel, Launches, Transfer
from tests.support.launches.hardware import Setting
from tests.support.launches.queues import Queues

PROCESSORS = 132
"""Streaming multiprocessors of an H100."""


def seconds(pipeline: Sequence[Launches], setting: Setting, hop: float, processors: int) -> float:
    """Return the time until the last end of a kernel on the compute stream; the host takes no time.

    A message takes ``hop`` seconds once both its ends have started.  From its start to its end it occupies
    ``processors`` of the device, and the kernels of compute run as much slower.  Raises RuntimeError, with
    the circle, for a pipeline that hangs.
    """
    return _Clocked(pipeline, setting, hop, processors).measure()


class _Clocked(Queues):
    """The queues with a clock.  A rank runs at most one kernel of its compute stream at a time."""

    def __init__(self, pipeline: Sequence[Launches], setting: Setting, hop: float, processors: int) -> None:
        super().__init__(pipeline, setting)
        self._hop, self._processors = hop, processors
        self._now = self._last_end = 0.0
        # Sorted by the predicted end, then by the number of the prediction; with the rank and the launch.
        self._forecasts: list[tuple[float, int, int, int]] = []
        self._valid: dict[tuple[int, int], int] = {}
        self._count = 0
        ranks = len(pipeline)
        self._resident = [0] * ranks
        self._running: list[int | None] = [None] * ranks
        self._left = [0.0] * ranks
        self._since = [0.0] * ranks

    def measure(self) -> float:
        self._settle()
        while self._forecasts:
            end, count, rank, at = heappop(self._forecasts)
            if self._valid.get((rank, at)) != count:
                continue
            self._now = end
            self._finish(rank, at)
            self._settle()
        if hangs := "\n".join(self._circle()):
            raise RuntimeError(f"the pipeline hangs:\n{hangs}")
        return self._last_end

    def _start(self, rank: int, at: int) -> None:
        if self._is_message(rank, at):
            self._occupy(rank, 1)
        super()._start(rank, at)

    def _begin(self, rank: int, at: int) -> None:
        entry = self._ranks[rank][at].entry
        if isinstance(entry, Kernel):
            self._running[rank], self._left[rank], self._since[rank] = at, entry.seconds, self._now
            self._foresee_kernel(rank)
        elif self._is_message(rank, at):
            self._foresee(self._now + self._hop, rank, at)
        else:
            self._finish(rank, at)

    def _finish(self, rank: int, at: int) -> None:
        if self._is_message(rank, at):
            self._occupy(rank, -1)
        elif self._running[rank] == at:
            self._running[rank] = None
            self._last_end = self._now
        super()._finish(rank, at)

    def _occupy(self, rank: int, more: int) -> None:
        self._left[rank] -= (self._now - self._since[rank]) * self._speed(rank)
        self._since[rank] = self._now
        self._resident[rank] += more
        if self._running[rank] is not None:
            self._foresee_kernel(rank)

    def _speed(self, rank: int) -> float:
        # However many messages wait, at least one processor is left to compute.
        return max(1, PROCESSORS - self._processors * self._resident[rank]) / PROCESSORS

    def _foresee_kernel(self, rank: int) -> None:
        at = self._running[rank]
        assert at is not None
        self._foresee(self._now + self._left[rank] / self._speed(rank), rank, at)

    def _foresee(self, end: float, rank: int, at: int) -> None:
        self._count += 1
        self._valid[rank, at] = self._count
        heappush(self._forecasts, (end, self._count, rank, at))

    def _is_message(self, rank: int, at: int) -> bool:
        return isinstance(self._ranks[rank][at].entry, Transfer | Batch | Collective)
