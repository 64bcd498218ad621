"""On a device, actions are timed where the device reaches them, not where the program asks for them.

On a CPU, their processor time is kept as well.
"""

from __future__ import annotations

import time

import pytest
import torch

from megatron_pp_ext.runtime import recorder as clock_offset
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule.actions import Action, Kind

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
