"""Records the seconds and the live bytes of every action of a step, by the clock of the first rank."""

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.activation_meter import ActivationMeter
from megatron_pp_ext.runtime.groups import wire_of
from megatron_pp_ext.runtime.split import STORE, Owner
from megatron_pp_ext.schedule.actions import Action, Kind, Label, Span
from megatron_pp_ext.schedule.recorded import Measured, RankRecord, Reduction

ROUNDS = 10
"""Requests of each rank; its first one waits until the first rank has served the ranks before it."""


class Offset(NamedTuple):
    """Seconds to add to this rank's clock to get the first rank's, and how wrong they may be at most."""

    seconds: float
    error: float


def now() -> float:
    """Return the seconds of this machine's monotonic clock."""
    return time.perf_counter()


def processor_seconds() -> float:
    """Return the seconds for which a core has worked for this thread.

    Autograd runs the backward of tensors in a CPU's memory in the thread that requests it, so that this clock
    counts forwards and backwards alike.  It leaves out the threads with which OpenMP shares an operation:
    they work while this one does.
    """
    return time.thread_time()


def offset_to_first(group: dist.ProcessGroup, device: torch.device) -> Offset:
    """Measure the offset of this rank's clock from the clock of ``group``'s first rank.

    Collective over ``group``, whose ranks compute on ``device``; the host waits for every message.

    The clocks of two machines have nothing in common.  Before the times of several ranks are compared, each
    rank requests the time from the first one.  The first rank reads its clock at some moment of the round
    trip; if that is taken to be the middle, the error is half the round trip at most.  The shortest of
    several round trips is used.

    On a GPU the host is ahead of its messages: it goes on as soon as a send or a receive is launched. Each
    side therefore reads its clock only around numbers that its host holds: the first rank once it holds the
    request's number, the others before they launch the request and once they hold the reply's number.
    """
    first, *peers = dist.get_process_group_ranks(group)
    number = torch.zeros(1, dtype=torch.float64, device=wire_of(group, device))
    if dist.get_rank() != first:
        return min(
            (_round_trip(first, number, group) for _ in range(ROUNDS)), key=lambda offset: offset.error
        )
    for peer in peers:
        for _ in range(ROUNDS):
            _receive(number, peer, group)
            number.fill_(now())
            dist.send(number, peer, group=group)
    return Offset(0.0, 0.0)


def _round_trip(first: int, number: torch.Tensor, group: dist.ProcessGroup) -> Offset:
    start = now()
    dist.send(number, first, group=group)
    reply = _receive(number, first, group)
    half = (now() - start) / 2
    return Offset(reply - (start + half), half)


def _receive(number: torch.Tensor, sender: int, group: dist.ProcessGroup) -> float:
    """Receive into ``number``, and return it once it is on this host."""
    dist.recv(number, sender, group=group)
    return number.item()


_Mark = float | torch.Event
"""A moment, as seconds on this machine's clock or as a place in the device's queue of work."""


class _Interval(NamedTuple):
    action: Action
    start: _Mark
    end: _Mark
    live_bytes: int
    processor_seconds: float | None


class StepRecorder:
    """Keeps the record of this rank's last steps; its ``parameters`` do not count as activations.

    Times are on the machine's monotonic clock.  On a device, which runs later than the host launches, they
    are the times at which the device reached the begin and the end of an action.  The host waits for the
    device before and after a recorded step, and never within it.  Without a device, the processor time of
    each action is recorded too.

    A recorder that does not ``wait`` before a step is cheap enough for every step, and leaves processor time
    out.  On a device all its times are late by one unknown time: only their differences mean something
    (``since_meeting``).
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = (), *, waits: bool = True) -> None:
        self.meter = ActivationMeter(parameters)
        self._waits = waits
        self._is_metered = True
        self._recorded: list[torch.Event] = []
        self._unused: list[torch.Event] = []
        self._origin: tuple[float, torch.Event] | None = None
        self._events: list[_Interval] = []
        self._reductions: list[tuple[int, _Mark, _Mark]] = []
        self._reducing: dict[Hashable, _Mark] = {}
        self._spans: list[tuple[Label, _Mark, _Mark]] = []

    def forget(self) -> None:
        """Drop all records and start new peaks; tensors that are alive stay counted."""
        self._events, self._reductions, self._reducing, self._spans = [], [], {}, []
        self._origin = None
        self._unused += self._recorded  # to make an event takes longer than to record it
        self._recorded = []
        self.meter.reset_peak()

    @contextmanager
    def step(self, *, metered: bool = True) -> Iterator[None]:
        """Record the step inside, after the steps that are recorded already.

        Counting bytes takes time in every forward.  Unless ``metered``, only seconds are recorded, and
        the bytes stay as before.
        """
        self._is_metered = metered
        if self._origin is None and torch.accelerator.is_available():
            if self._waits:
                torch.accelerator.synchronize()
            self._origin = now(), self._event()
        STORE.meter = self.meter if metered else None
        try:
            yield
        finally:
            STORE.meter = None

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        counts_work = self._waits and self._origin is None
        start, worked = self._mark(), processor_seconds() if counts_work else 0.0
        owner = Owner(action.stage, action.microbatch)
        with self.meter.forward(owner) if action.kind is Kind.F and self._is_metered else nullcontext():
            yield
        seconds = processor_seconds() - worked if counts_work else None
        self._events.append(_Interval(action, start, self._mark(), self.meter.live_bytes, seconds))

    @contextmanager
    def span(self, label: Label) -> Iterator[None]:
        start = self._mark()
        yield
        self._spans.append((label, start, self._mark()))

    def reduction_started(self, bucket: Hashable) -> None:
        """Record that the reduction of ``bucket``, any name for it, has begun; only the first call counts."""
        self._reducing.setdefault(bucket, self._mark())

    def reduction_ended(self, bucket: Hashable, chunk: int) -> None:
        """Record that the step has waited for ``bucket`` of ``chunk``."""
        if bucket in self._reducing:
            self._reductions.append((chunk, self._reducing.pop(bucket), self._mark()))

    @property
    def record(self) -> RankRecord:
        if self._origin is not None:
            torch.accelerator.synchronize()
        return RankRecord(
            tuple(
                Measured(action, self._seconds(start), self._seconds(end), live, processor_seconds)
                for action, start, end, live, processor_seconds in self._events
            ),
            self.meter.peak_bytes,
            self.meter.peak_microbatches,
            tuple(
                Reduction(chunk, self._seconds(start), self._seconds(end))
                for chunk, start, end in self._reductions
            ),
            device_bytes=torch.cuda.max_memory_allocated() or None,
            spans=tuple(
                Span(label, self._seconds(start), self._seconds(end)) for label, start, end in self._spans
            ),
        )

    def _mark(self) -> _Mark:
        return now() if self._origin is None else self._event()

    def _event(self) -> torch.Event:
        """Return an event at the present end of the device's queue of work."""
        event = self._unused.pop() if self._unused else torch.Event(enable_timing=True)
        event.record()
        self._recorded.append(event)
        return event

    def since_meeting(self, group: dist.ProcessGroup, device: torch.device) -> RankRecord:
        """Return the record on a clock that starts at a meeting of all ranks of ``group``, which is now.

        Collective over ``group``, whose ranks compute on ``device``; the host waits for it.

        An all-reduce ends on all ranks at nearly the same moment, since none can end it before the last has
        begun.  So the records of all ranks are on one clock, to within the skew of that end, without messages
        between pairs of ranks.  Times of the step before are negative.
        """
        if self._origin is not None:
            torch.accelerator.synchronize()
        dist.all_reduce(torch.zeros(1, device=wire_of(group, device)), group=group)
        meeting = self._mark()
        record = self.record
        return record.moved(-self._seconds(meeting), record.clock_error)

    def _seconds(self, mark: _Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert self._origin is not None
        seconds, event = self._origin
        return seconds + event.elapsed_time(mark) / 1e3


def aligned(record: RankRecord, group: dist.ProcessGroup, device: torch.device) -> RankRecord:
    """Return ``record`` on the clock of ``group``'s first rank.

    Collective over ``group``; see ``offset_to_first``.
    """
    return record.moved(*offset_to_first(group, device))


def numbers_of_all(
    numbers: Sequence[float], group: dist.ProcessGroup, device: torch.device
) -> list[list[float]]:
    """Return the ``numbers`` of each rank of ``group``, on all of them; collective, and the host waits."""
    sent = torch.tensor(numbers, dtype=torch.float64, device=wire_of(group, device))
    received = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(received, sent, group=group)
    return [tensor.tolist() for tensor in received]


def gather[T](record: T, group: dist.ProcessGroup) -> list[T] | None:
    """Return the records of all ranks of ``group`` on its first rank; None on the others."""
    first = dist.get_process_group_ranks(group)[0]
    records: list[T] | None = None
    if dist.get_rank() == first:
        records = [record] * dist.get_world_size(group)
    dist.gather_object(record, records, dst=first, group=group)
    return records
