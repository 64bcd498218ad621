"""On a device, actions are timed where the device reaches them, not where the program asks for them."""

from __future__ import annotations

import pytest
import torch

from megatron_pp_ext.runtime import clock_offset
from megatron_pp_ext.runtime.recorder import StepRecorder
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
    assert record.events == ((action, 101.0 + LAG, 103.0 + LAG, 0),)
    assert record.reductions == ((1, 103.0 + LAG, 104.0 + LAG),)
