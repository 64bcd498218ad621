"""Ranks whose clocks differ: their distances are found, and recorded steps are put on one clock."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.runtime import clock_offset
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.recorder import StepRecorder, aligned, gather
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.idle_time import gaps
from megatron_pp_ext.schedule.recorded import RecordedStep
from tests.support import plain_stages
from tests.support.ranks import run_ranks

AHEAD = (0.0, 1000.0, -70.5)
"""Seconds by which each rank's clock is ahead of the machine's."""

CPU = torch.device("cpu")


def rounded(reading: float) -> float:
    """Return the seconds by which four additions to a clock's reading may round it."""
    return 4 * math.ulp(reading + max(AHEAD))


def record_with_own_clock(rank: int) -> list | None:
    clock_offset.now = lambda: time.perf_counter() + AHEAD[rank]
    dist.init_process_group("gloo")
    schedule = catalog.build("zb-h1", len(AHEAD), 4)
    stage = plain_stages.make_stage(rank, len(AHEAD))
    channels = plain_stages.make_channels(len(AHEAD))
    recorder = StepRecorder(stage.module.parameters())
    with recorder.step():
        execute(plan_rank(schedule, rank), Rank({rank: stage}, channels, recorder))
    own, together = recorder.record, aligned(recorder.record, dist.group.WORLD, CPU)
    return gather((own, together), dist.group.WORLD)


def test_recorded_steps_are_put_on_one_clock():
    before = time.perf_counter()
    pairs = run_ranks(record_with_own_clock, len(AHEAD))[0]
    after = time.perf_counter()
    placement = catalog.build("zb-h1", len(AHEAD), 4).placement
    for (own, together), ahead in zip(pairs, AHEAD, strict=True):
        moved = together.events[0].start - own.events[0].start
        assert moved == pytest.approx(-ahead, abs=together.clock_error + rounded(after), rel=0)
        ends = together.moved(-moved, 0.0).events[-1].end, own.events[-1].end
        assert ends[0] == pytest.approx(ends[1], abs=rounded(after), rel=0)
    errors = [together.clock_error for _, together in pairs]
    assert errors[0] == 0
    # Half a round trip, and all of them were over within the run.
    assert all(0 < error < (after - before) / 2 for error in errors[1:])
    # On one clock no action starts before what it needs from another rank has ended; on their own they do.
    for which, holds in ((1, True), (0, False)):
        records = tuple(pair[which] for pair in pairs)
        early = [
            wait.sent - wait.until
            for rank in gaps(RecordedStep("zb-h1", placement, records))
            for wait in rank
            if wait.sent is not None
        ]
        assert (max(early) <= 2 * max(errors)) == holds


class Clock:
    """One clock for all ranks: it moves by a tick when it is read, and as far as it is told to."""

    def __init__(self) -> None:
        self._seconds, self._lock = 0.0, threading.Lock()

    def read(self) -> float:
        return self.move(TICK)

    def move(self, seconds: float) -> float:
        with self._lock:
            self._seconds += seconds
            return self._seconds


class Device:
    """A rank's device, which does one thing after the other while its host goes on."""

    def __init__(self) -> None:
        self.stream = ThreadPoolExecutor(max_workers=1)

    def launch(self, work: Callable[[], Any]) -> Any:
        return self.stream.submit(work)


class Number:
    """A tensor of one number on a device: only ``item`` waits for what was launched."""

    def __init__(self, device: Device, before_waiting: Callable[[], None]) -> None:
        self.device, self.value, self._before_waiting = device, 0.0, before_waiting

    def fill_(self, value: float) -> None:
        self.device.launch(lambda: setattr(self, "value", value))

    def item(self) -> float:
        self._before_waiting()
        return self.device.launch(lambda: self.value).result(timeout=30)


TICK, LATER = 2.0**-10, 2.0
"""Seconds that a look at the clock takes, and those between the first rank's readiness and a question."""


def ask_over_gloo(rank: int) -> clock_offset.Offset:
    dist.init_process_group("gloo")
    return clock_offset.offset_to_first(dist.group.WORLD, torch.device("meta"))


def test_gloo_gets_the_time_from_the_host_s_memory() -> None:
    """It cannot send what a device holds: here one that holds nothing at all."""
    first, other = run_ranks(ask_over_gloo, 2)
    assert first == (0, 0)
    assert abs(other.seconds) <= other.error  # both read one machine's clock


@pytest.fixture
def ask_over_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[clock_offset.Offset]]:
    """``offset_to_first`` on ranks that are threads, whose sends and receives are over once launched.

    A rank asks ``LATER`` after the first rank waits for its question, or has answered without waiting.
    """
    ranks = range(len(AHEAD))
    links: dict[tuple[int, int], Queue] = {(a, b): Queue() for a in ranks for b in ranks}
    may_ask = {rank: threading.Event() for rank in ranks}
    here = threading.local()
    clock = Clock()

    def send(number: Number, to: int, group: Any) -> None:
        if here.rank == 0:
            may_ask[to].set()
        link = links[here.rank, to]
        number.device.launch(lambda: link.put(number.value))

    def recv(number: Number, sender: int, group: Any) -> None:
        here.sender = sender
        link = links[sender, here.rank]
        number.device.launch(lambda: setattr(number, "value", link.get(timeout=30)))

    def waits() -> None:
        if here.rank == 0:
            may_ask[here.sender].set()

    def run(rank: int) -> clock_offset.Offset:
        here.rank = rank
        if rank > 0:
            assert may_ask[rank].wait(timeout=30)
            clock.move(LATER)
        return clock_offset.offset_to_first(None, Device())

    fake = SimpleNamespace(
        get_process_group_ranks=lambda group: list(ranks), get_rank=lambda: here.rank, send=send, recv=recv
    )
    monkeypatch.setattr(clock_offset, "dist", fake)
    monkeypatch.setattr(clock_offset, "wire_of", lambda group, device: device)
    zeros = SimpleNamespace(zeros=lambda size, dtype, device: Number(device, waits), float64=None)
    monkeypatch.setattr(clock_offset, "torch", zeros)
    monkeypatch.setattr(clock_offset, "now", lambda: clock.read() + AHEAD[here.rank])

    def ask() -> list[clock_offset.Offset]:
        with ThreadPoolExecutor(len(AHEAD)) as hosts:
            return list(hosts.map(run, ranks))

    return ask


def test_messages_that_are_over_once_launched_are_waited_for(ask_over_devices) -> None:
    """A first rank that reads its clock when its receive returns gives a time before the question."""
    offsets = ask_over_devices()
    assert offsets[0] == (0, 0)
    for offset, ahead in zip(offsets[1:], AHEAD[1:], strict=True):
        assert abs(offset.seconds + ahead) <= offset.error
        # The clock is read twice more in a round trip: by the first rank, and where it ends.
        assert offset.error == TICK


def test_the_shortest_round_trip_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round trips are held up differently; the first rank answers in the middle of the shortest."""
    delays = [3.0, 0.5, 2.0] * clock_offset.ROUNDS
    here, ahead = {"now": 100.0}, 1000.0

    class Number:
        value = 0.0

        def item(self) -> float:
            return self.value

    def send(number: Number, to: int, group: Any) -> None:
        here["now"] += 0.25
        number.value = here["now"] + ahead

    def recv(number: Number, sender: int, group: Any) -> None:
        here["now"] += delays.pop(0)

    fake = SimpleNamespace(
        get_process_group_ranks=lambda group: [0, 1], get_rank=lambda: 1, send=send, recv=recv
    )
    monkeypatch.setattr(clock_offset, "dist", fake)
    monkeypatch.setattr(clock_offset, "wire_of", lambda group, device: device)
    zeros = SimpleNamespace(zeros=lambda size, dtype, device: Number(), float64=None)
    monkeypatch.setattr(clock_offset, "torch", zeros)
    monkeypatch.setattr(clock_offset, "now", lambda: here["now"])
    # Asked at 0, answered at 0.25, back at 0.75: the answer is taken for that of 0.375.
    assert clock_offset.offset_to_first(None, None) == (ahead + 0.25 - 0.375, 0.375)
