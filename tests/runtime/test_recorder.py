"""On a device, actions are timed where the device reaches them, not where the program asks for them.

On a CPU, their processor time is kept as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.runtime import recorder as clock_offset
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.recorder import StepRecorder, aligned, gather, numbers_of_all
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.recorded import RecordedStep, gaps
from tests.support import plain_stages
from tests.support.ranks import run_ranks

START, LAG = 100.0, 7.0
"""Seconds by which the device is behind the program."""


class Event:
    """A place in the queue of a device that is LAG behind, which tells its time once it was waited for."""

    waited = 0
    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        # The first event finds an empty queue, as the device was waited for.
        self.reached = Event.now + (LAG if Event.now > START else 0.0)

    def elapsed_time(self, later: Event) -> float:
        assert Event.waited == 2, "read before the device was done"
        return 1e3 * (later.reached - self.reached)


def test_a_device_is_asked_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> None:
        Event.waited += 1

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    monkeypatch.setattr(clock_offset, "now", lambda: Event.now)
    recorder = StepRecorder()
    Event.now = START
    action = Action(0, Kind.W, 0)
    with recorder.step():
        Event.now = 101.0
        with recorder.during(action):
            Event.now = 103.0
        recorder.reduction_started("bucket")
        Event.now = 104.0
        recorder.reduction_ended("bucket", 1)
    assert Event.waited == 1, "a step is not to be held up"
    record = recorder.record
    assert record.events == ((action, 101.0 + LAG, 103.0 + LAG, 0, None),)
    assert record.reductions == ((1, 103.0 + LAG, 104.0 + LAG),)


def test_a_cheap_recorder_waits_for_no_device_and_makes_events_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Event] = []

    def event(enable_timing: bool) -> Event:
        made.append(Event(enable_timing))
        return made[-1]

    monkeypatch.setattr(torch, "Event", event)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: pytest.fail("waits for the device"))
    recorder = StepRecorder(waits=False)
    for _ in range(3):
        recorder.forget()
        with recorder.step(metered=False), recorder.during(Action(0, Kind.W, 0)):
            pass
    assert len(made) == 3, "the step's begin, and the action's begin and end"


def test_waiting_for_a_core_is_no_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 100.0, "processor_seconds": 7.0}
    for name in clock:
        monkeypatch.setattr(clock_offset, name, lambda name=name: clock[name])
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    recorder = StepRecorder()
    action = Action(0, Kind.W, 0)
    with recorder.step(), recorder.during(action):
        clock["now"] += 5.0
        clock["processor_seconds"] += 2.0
    assert recorder.record.events == ((action, 100.0, 105.0, 0, 2.0),)


class Work(torch.autograd.Function):
    """A backward that keeps a core for ``SECONDS``."""

    SECONDS = 0.02

    @staticmethod
    def forward(context: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        until = time.thread_time() + Work.SECONDS
        while time.thread_time() < until:
            pass
        return gradient


def test_the_backward_counts_as_the_threads_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd has to run it in the thread whose processor time is recorded."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    output = Work.apply(torch.ones(1, requires_grad=True))
    recorder = StepRecorder()
    with recorder.step(), recorder.during(Action(0, Kind.B, 0)):
        output.backward()
    (event,) = recorder.record.events
    assert event.processor_seconds is not None
    assert event.processor_seconds >= Work.SECONDS


def forward(recorder: StepRecorder, number: int = 0) -> torch.Tensor:
    with recorder.during(Action(0, Kind.F, number)):
        return torch.ones(2, 3, requires_grad=True).square()


def test_timed_steps_count_no_bytes() -> None:
    """Neither those of forwards nor those that wait for W: counting takes time, which would be measured."""
    recorder = StepRecorder()
    with recorder.step(metered=False):
        kept = forward(recorder)
        assert STORE.meter is None
    assert kept.requires_grad and recorder.record.peak_bytes == 0
    with recorder.step():
        kept = forward(recorder)
        assert STORE.meter is recorder.meter
    assert STORE.meter is None
    assert recorder.record.peak_bytes == 4 * 2 * 3


def test_a_reduction_starts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron may call for a bucket that is under way; its first call is when it left."""
    times = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(clock_offset, "now", lambda: next(times))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    recorder = StepRecorder()
    recorder.reduction_started("bucket")
    recorder.reduction_started("bucket")
    recorder.reduction_ended("bucket", 1)
    recorder.reduction_ended("bucket", 1)
    assert recorder.record.reductions == ((1, 1.0, 3.0),)


def test_a_step_that_is_forgotten() -> None:
    """Neither its actions, nor its reductions, nor its peak are in the record of the next one."""
    recorder = StepRecorder()
    with recorder.step():
        both = forward(recorder), forward(recorder, 1)
        recorder.reduction_started("bucket")
        recorder.reduction_ended("bucket", 0)
    assert recorder.record.peak_microbatches == len(both)
    del both
    recorder.forget()
    with recorder.step():
        kept = forward(recorder, 2)
    record = recorder.record
    assert [event.action.microbatch for event in record.events] == [2]
    assert (record.reductions, record.peak_bytes, record.peak_microbatches) == ((), kept.nbytes, 1)


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
    met = recorder.since_meeting(dist.group.WORLD, CPU)
    ends = numbers_of_all([met.events[0].start, met.events[-1].end], dist.group.WORLD, CPU)
    return gather((own, together, met, ends), dist.group.WORLD)


def test_recorded_steps_are_put_on_one_clock():
    before = time.perf_counter()
    pairs = run_ranks(record_with_own_clock, len(AHEAD))[0]
    after = time.perf_counter()
    placement = catalog.build("zb-h1", len(AHEAD), 4).placement
    for (own, together, met, ends), ahead in zip(pairs, AHEAD, strict=True):
        moved = together.events[0].start - own.events[0].start
        assert moved == pytest.approx(-ahead, abs=together.clock_error + rounded(after), rel=0)
        moved_back = together.moved(-moved, 0.0).events[-1].end
        assert moved_back == pytest.approx(own.events[-1].end, abs=rounded(after), rel=0)
        # All ranks meet after the step and within the run; each then knows the times of all.
        assert before - after < met.events[0].start < met.events[-1].end < 0
        assert ends == [[other.events[0].start, other.events[-1].end] for _, _, other, _ in pairs]
    errors = [together.clock_error for _, together, _, _ in pairs]
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


class Number:
    """A number on a device, whose messages are over once launched; only ``item`` waits for them."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.value, self._wait = 0.0, wait

    def fill_(self, value: float) -> None:
        self.value = value

    def item(self) -> float:
        self._wait()
        return self.value


def offset_of(rank: int, monkeypatch: pytest.MonkeyPatch, wait, now, **messages) -> clock_offset.Offset:
    """``offset_to_first`` on ``rank`` of two, whose clock, messages and waits for them are stand-ins."""
    fake = SimpleNamespace(get_process_group_ranks=lambda group: [0, 1], get_rank=lambda: rank, **messages)
    monkeypatch.setattr(clock_offset, "dist", fake)
    monkeypatch.setattr(clock_offset, "wire_of", lambda group, device: device)
    zeros = SimpleNamespace(zeros=lambda size, dtype, device: Number(wait), float64=None)
    monkeypatch.setattr(clock_offset, "torch", zeros)
    monkeypatch.setattr(clock_offset, "now", now)
    return clock_offset.offset_to_first(None, None)


def ask_over_gloo(rank: int) -> clock_offset.Offset:
    dist.init_process_group("gloo")
    return clock_offset.offset_to_first(dist.group.WORLD, torch.device("meta"))


def test_gloo_gets_the_time_from_the_host_s_memory() -> None:
    """It cannot send what a device holds: here one that holds nothing at all."""
    first, other = run_ranks(ask_over_gloo, 2)
    assert first == (0, 0)
    assert abs(other.seconds) <= other.error  # both read one machine's clock


def test_the_first_rank_reads_its_clock_once_it_holds_the_request(monkeypatch) -> None:
    """If it did when its receive returns, it would give a time before the request."""
    done: list[str] = []
    found = offset_of(
        0,
        monkeypatch,
        wait=lambda: done.append("holds"),
        now=lambda: done.append("reads") or 7.0,
        recv=lambda number, sender, group: done.append("receives"),
        send=lambda number, to, group: done.append(f"sends {number.value:g}"),
    )
    assert found == (0, 0)
    assert done == ["receives", "holds", "reads", "sends 7"] * clock_offset.ROUNDS


def test_the_shortest_round_trip_counts(monkeypatch) -> None:
    """Round trips are held up differently; the first rank answers in the middle of the shortest."""
    delays = [3.0, 0.5, 2.0] * clock_offset.ROUNDS
    here, ahead = {"now": 100.0}, 1000.0

    def send(number: Number, to: int, group: object) -> None:
        here["now"] += 0.25
        number.value = here["now"] + ahead

    def wait() -> None:
        here["now"] += delays.pop(0)

    # Asked at 0, answered at 0.25, back at 0.75: the answer is taken for that of 0.375.
    found = offset_of(1, monkeypatch, wait, lambda: here["now"], send=send, recv=lambda *_, **group: None)
    assert found == (ahead + 0.25 - 0.375, 0.375)
