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
from megatron_pp_ext.runtime.channels import Channels, direction_groups
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.module_stage import ModuleStage
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.recorder import StepRecorder, aligned, gather
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.idle_time import waits
from megatron_pp_ext.schedule.recorded import RecordedStep
from tests.runtime import test_executor
from tests.support.ranks import run_ranks

AHEAD = (0.0, 1000.0, -70.5)
"""Seconds by which each rank's clock is ahead of the machine's."""

CPU = torch.device("cpu")


def rounded() -> float:
    """Seconds by which a few roundings may move a clock's reading, which counts from the machine's start."""
    return 8 * math.ulp(time.perf_counter() + max(AHEAD))


def record_with_own_clock(rank: int) -> list | None:
    clock_offset.now = lambda: time.perf_counter() + AHEAD[rank]
    dist.init_process_group("gloo")
    pipeline = list(range(len(AHEAD)))
    schedule = catalog.build("zb-h1", len(AHEAD), 4)
    stage = ModuleStage(
        rank,
        test_executor.make_module(rank),
        first_inputs=test_executor.microbatch_data if rank == 0 else None,
        loss=test_executor.loss if rank == len(AHEAD) - 1 else None,
    )
    shape = (test_executor.ROWS, test_executor.WIDTH)
    channels = Channels(pipeline, *direction_groups(pipeline), shape, torch.double, CPU)
    recorder = StepRecorder(stage.module.parameters())
    with recorder.step():
        execute(plan_rank(schedule, rank), {rank: stage}, channels, recorder)
    own, together = recorder.record, aligned(recorder.record, dist.group.WORLD, CPU)
    return gather((own, together), dist.group.WORLD)


def test_recorded_steps_are_put_on_one_clock():
    pairs = run_ranks(record_with_own_clock, len(AHEAD))[0]
    placement = catalog.build("zb-h1", len(AHEAD), 4).placement
    for (own, together), ahead in zip(pairs, AHEAD, strict=True):
        moved = together.events[0].start - own.events[0].start
        assert moved == pytest.approx(-ahead, abs=together.clock_error + rounded())
        assert together.moved(-moved, 0.0).events[-1].end == pytest.approx(own.events[-1].end)
    errors = [together.clock_error for _, together in pairs]
    assert errors[0] == 0
    assert all(0 < error < 1 for error in errors[1:])
    # On one clock no action starts before what it needs from another rank has ended; on their own they do.
    for which, holds in ((1, True), (0, False)):
        records = tuple(pair[which] for pair in pairs)
        early = [
            wait.sent - wait.until
            for rank in waits(RecordedStep("zb-h1", placement, records))
            for wait in rank
            if wait.sent is not None
        ]
        assert (max(early) <= 2 * max(errors)) == holds


class Device:
    """A rank's device, which does one thing after the other while its host goes on."""

    def __init__(self) -> None:
        self.stream = ThreadPoolExecutor(max_workers=1)

    def launch(self, work: Callable[[], Any]) -> Any:
        return self.stream.submit(work)


class Number:
    """A tensor of one number on a device: only ``item`` waits for what was launched."""

    def __init__(self, device: Device) -> None:
        self.device, self.value = device, 0.0

    def fill_(self, value: float) -> None:
        self.device.launch(lambda: setattr(self, "value", value))

    def item(self) -> float:
        return self.device.launch(lambda: self.value).result(timeout=30)


@pytest.fixture
def ask_over_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[clock_offset.Offset]]:
    """``offset_to_first`` on ranks that are threads, whose sends and receives are over once launched."""
    ranks = range(len(AHEAD))
    links: dict[tuple[int, int], Queue] = {(a, b): Queue() for a in ranks for b in ranks}
    here = threading.local()

    def send(number: Number, to: int, group: Any) -> None:
        link = links[here.rank, to]
        number.device.launch(lambda: link.put(number.value))

    def recv(number: Number, sender: int, group: Any) -> None:
        link = links[sender, here.rank]
        number.device.launch(lambda: setattr(number, "value", link.get(timeout=30)))

    def run(rank: int) -> clock_offset.Offset:
        here.rank = rank
        time.sleep(LATER * rank)
        return clock_offset.offset_to_first(None, Device())

    fake = SimpleNamespace(
        get_process_group_ranks=lambda group: list(ranks), get_rank=lambda: here.rank, send=send, recv=recv
    )
    monkeypatch.setattr(clock_offset, "dist", fake)
    zeros = SimpleNamespace(zeros=lambda size, dtype, device: Number(device), float64=None)
    monkeypatch.setattr(clock_offset, "torch", zeros)
    monkeypatch.setattr(clock_offset, "now", lambda: time.perf_counter() + AHEAD[here.rank])

    def ask() -> list[clock_offset.Offset]:
        with ThreadPoolExecutor(len(AHEAD)) as hosts:
            return list(hosts.map(run, ranks))

    return ask


LATER = 0.1
"""Seconds by which a rank asks later than the one before it: far more than a round trip takes."""


def test_messages_that_are_over_once_launched_are_waited_for(ask_over_devices) -> None:
    """A first rank that reads its clock when its receive returns tells a time before the question."""
    offsets = ask_over_devices()
    assert offsets[0] == (0, 0)
    for offset, ahead in zip(offsets[1:], AHEAD[1:], strict=True):
        assert offset.seconds == pytest.approx(-ahead, abs=offset.error + rounded(), rel=0)
        assert 0 < offset.error < LATER / 2
