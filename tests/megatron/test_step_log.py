"""The measured numbers of a step in Megatron's log: what they are, where they stand, and what they change."""

import builtins
import gc
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from megatron.training import training

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.costs import system
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.runners import step_log
from megatron_pp_ext.megatron.runners.pipeline_runner import Unobserved
from megatron_pp_ext.megatron.runners.step_log import StepLog
from megatron_pp_ext.megatron.step_numbers import (
    BUBBLE,
    MEASURED,
    MFU,
    PEAK,
    PEAK_TO_PLAN,
    RATES,
    STEP_TO_PLAN,
)
from megatron_pp_ext.megatron.trainer import step_fields
from megatron_pp_ext.runtime import recorder
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.costs import CostModel, Costs, StageCosts
from megatron_pp_ext.schedule.formats import costs_file, trace_file
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.comparison import Result, assert_same_bits, run
from tests.support.ranks import run_ranks
from tests.support.training import initialize_by_layer, scalars

NAMES = {BUBBLE, PEAK, PEAK_TO_PLAN, STEP_TO_PLAN}
PEAK_RATE = 1e12
"""Operations a second of the device of these tests; Megatron's unit is as many."""

COSTS = Costs(tuple(StageCosts(2e-3, 1e-3, 1e-3) for _ in range(4)))
V_HALF = ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "v-half", "--clip-grad", "0")
FLAGS = (*V_HALF, "--log-throughput", "--log-timers-to-tensorboard", "--tensorboard-log-interval", "1")


def job(folder: Path, *flags: str) -> tuple[Result, list[str], dict[str, dict[int, float]]]:
    """Train, and return the results, the lines of all iterations, and the scalars."""
    file = folder.with_suffix(".txt")

    def listen(chunks: list[torch.nn.Module]) -> None:
        initialize_by_layer(chunks)
        stock_print = builtins.print

        def kept(*texts: object, **options: Any) -> None:
            stock_print(*texts, **options)
            if texts and re.search(r" iteration +\d+/", str(texts[0])):
                with file.open("a") as lines:
                    stock_print(*texts, file=lines)

        builtins.print = kept

    result = run(2, [*flags, "--tensorboard-dir", str(folder)], initialize=listen)
    return result, file.read_text().splitlines(), scalars(folder)


def test_the_log_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are those of the trace of the same step, and change no bit of the training."""
    costs, trace = tmp_path / "costs.json", tmp_path / "trace.json"
    costs_file.write(COSTS, costs)
    monkeypatch.setattr(step_fields, "peak_of_device", lambda device, dtype: PEAK_RATE)
    words = [*FLAGS, "--pipeline-costs", str(costs)]
    traced, _, logged = job(tmp_path / "traced", *words, "--pipeline-trace", str(trace))
    ours, printed, light = job(tmp_path / "ours", *words)
    off, printed_off, logged_off = job(tmp_path / "off", *words, "--no-pipeline-log")
    assert_same_bits(ours, off)
    assert_same_bits(traced, off)

    of_last = {name: logged[name][2] for name in (*NAMES, MFU)}
    step = trace_file.read(trace)
    plan = simulate(catalog.build("v-half", 2, 8), COSTS)
    seconds = of_last[STEP_TO_PLAN] * plan.makespan
    busy = sum(record.busy for record in step.records)
    assert (1 - of_last[BUBBLE]) * 2 * seconds == pytest.approx(busy, rel=1e-4)  # events have float32
    assert of_last[PEAK] == max(record.peak_bytes for record in step.records)
    assert of_last[MFU] == logged["throughput"][2]

    assert light[PEAK] == dict.fromkeys((1, 2), of_last[PEAK]), "counted in the first step alone"
    assert light[PEAK_TO_PLAN][2] == of_last[PEAK_TO_PLAN]
    assert 0 < light[BUBBLE][2] < 1
    assert light.keys() - logged_off.keys() == {*NAMES, MFU}
    assert logged_off.keys() < light.keys()

    (number,) = re.findall(r" bubble: (\S+) \|", printed[1])
    assert float(number) == pytest.approx(light[BUBBLE][2], abs=6e-4)
    fields = re.findall(r" ([^|:]+): +\S+ \|", printed[1])
    assert fields[-6:] == [
        "pipeline",
        "bubble",
        "peak activations (MB)",
        "peak / plan",
        "step / plan",
        "MFU",
    ]
    assert " pipeline: v-half | " in printed[0]
    assert len(printed) == len(printed_off) == 2
    assert re.findall(r" ([^|:]+): +\S+ \|", printed_off[1]) == fields[:-6]


def test_the_interval_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other iterations measure nothing; W&B gets the numbers, and no line is left to the next print."""
    calls: list[str] = []
    sent: list[tuple[dict[str, float], int]] = []
    pipeline = requested.Pipeline(named("v-half", 2, 8), last_step=requested.LastStep(is_wanted=True))

    def numbers() -> dict[str, float]:
        calls.append("measured")
        return {BUBBLE: 0.25}

    def training_log(iteration: int, is_first_iteration: bool = False) -> bool:
        print_last(f"iteration {iteration}")
        return True

    pipeline.last_step.numbers = numbers
    print_last = step_fields.print_fields(calls.append)
    monkeypatch.setattr(step_fields, "get_args", lambda: SimpleNamespace(log_interval=2))
    monkeypatch.setattr(step_fields, "get_tensorboard_writer", lambda: None)
    wandb = SimpleNamespace(log=lambda values, iteration: sent.append((values, iteration)))
    monkeypatch.setattr(step_fields, "get_wandb_writer", lambda: wandb)
    log = step_fields.log_step(training_log)
    with requested.using(pipeline):
        assert log(1, is_first_iteration=True) and log(2) and log(3)
        pipeline.last_step.is_wanted = False
        log(4)
    with requested.using(None):
        log(6)
    fields = " pipeline: stock linear | bubble: 0.250 |".replace("stock linear", pipeline.name)
    assert calls == [
        "measured",
        f"iteration 1{fields}",
        "measured",
        f"iteration 2{fields}",
        "iteration 3",
        "iteration 4",
        "iteration 6",
    ]
    assert sent == [({BUBBLE: 0.25}, 2)]


class Steps:
    """Steps whose schedule is set."""

    def __init__(self, schedule: Any) -> None:
        self.ran = schedule
        self.stage_costs: Costs | None = None

    def schedule(self, inputs: Any) -> Any:
        return self.ran


def test_when_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step of a schedule; a captured step and an evaluation have no numbers of their own."""
    schedules = [catalog.build(name, 2, 2) for name in ("1f1b", "gpipe")]
    pipeline = requested.Pipeline(named("1f1b", 2, 2), last_step=requested.LastStep(is_wanted=True))
    steps = Steps(schedules[0])
    log = StepLog(pipeline, steps, Unobserved())  # type: ignore[arg-type]
    numbers = SimpleNamespace(model=[], group=None, microbatches=2, forward_only=False)

    def step(forward_only: bool = False) -> bool | None:
        numbers.forward_only = forward_only
        with log.step(numbers) as recorder:  # type: ignore[arg-type]
            if recorder is None:
                return None
            with recorder.during(Action(0, Kind.F, 0)):
                kept = torch.ones(3, requires_grad=True).square()
            is_counted = bool(recorder.meter.live_bytes)
            del kept
            return is_counted

    assert [step(), step(), step(True), step()] == [True, False, None, False]
    steps.ran = schedules[1]  # from a step on that began without knowing
    assert [step(), step(), step()] == [False, True, False]
    monkeypatch.setattr(step_log, "_is_captured", lambda: True)
    assert step() is None
    assert log.numbers() == {}
    monkeypatch.undo()
    assert step() is False
    pipeline.last_step.is_wanted = False
    assert step() is None


def compared(rank: int) -> dict[str, tuple[float | None, str]]:
    """Return a step against its plan for several plans, as the seconds of the step, and each plan's word."""
    torch.distributed.init_process_group("gloo")
    schedule = catalog.build("1f1b", 2, 2)
    inputs = SimpleNamespace(
        model=[], group=torch.distributed.group.WORLD, microbatches=2, forward_only=False
    )

    def costs(seconds: float) -> CostModel:
        return CostModel.fixed(Costs((StageCosts(seconds, seconds, seconds),) * 2))

    user, by_rates, unit = costs(3.0), {"seconds_by_rates": lambda schedule, device: 5.0}, costs(1.0)
    plans: dict[str, tuple[dict[str, Any], float | None, float]] = {
        "user": ({"seconds": user, **by_rates}, 2.0, 27.0),
        "measured": (by_rates, 2.0, 18.0),
        "unit costs, measured": ({"seconds": unit}, 2.0, 18.0),
        "rates": (by_rates, None, 5.0),
        "unit costs": ({"seconds": unit}, None, 1.0),
        "none": ({}, None, 1.0),
    }
    results = {}
    for name, (settings, measured, planned) in plans.items():
        last_step = requested.LastStep(is_wanted=True)
        pipeline = requested.Pipeline(
            named("1f1b", 2, 2), settings=requested.Settings(**settings), last_step=last_step
        )
        steps = Steps(schedule)
        steps.stage_costs = None if measured is None else costs(measured).of(pipeline.placement)
        log = StepLog(pipeline, steps, Unobserved())  # type: ignore[arg-type]
        with log.step(inputs) as recorder:  # type: ignore[arg-type]
            assert recorder is not None
            for action in schedule.orders[rank]:
                with recorder.during(action):
                    pass
        record = log._last.recorder.record.events if log._last else ()
        seconds = record[-1].end - record[0].start
        ratio = last_step.numbers().get(STEP_TO_PLAN)
        results[name] = None if ratio is None else ratio * planned / seconds, last_step.plan_by
    return results


def test_which_plan_a_step_is_compared_with() -> None:
    """Costs of the user, else those measured in this run, else the planner's rates; never unit costs."""
    (results,) = run_ranks(compared, 1)
    same = pytest.approx(1.0, rel=1e-6)
    assert results == {
        "user": (same, ""),
        "measured": (same, MEASURED),
        "unit costs, measured": (same, MEASURED),
        "rates": (same, RATES),
        "unit costs": (None, ""),
        "none": (None, ""),
    }


@pytest.mark.wide
@pytest.mark.parametrize("by", [MEASURED, RATES])
def test_a_step_against_the_plan_without_costs_of_the_user(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what was measured in step 1, or by the rates that the planner has of the device."""
    words = [*V_HALF, "--tensorboard-log-interval", "1"]
    if by == MEASURED:
        words += ["--pipeline-profile-steps", "1-1"]
    else:
        monkeypatch.setitem(system._BY_DEVICE, torch.cuda.get_device_name(), "h100")
    _, printed, logged = job(tmp_path / by, *words)
    steps = {1: printed[0], 2: printed[1]} if by == RATES else {2: printed[1]}
    assert logged[STEP_TO_PLAN].keys() == steps.keys()
    for step, line in steps.items():
        (number,) = re.findall(rf" step / plan \({by}\): (\S+) \|", line)
        assert float(number) == pytest.approx(logged[STEP_TO_PLAN][step], rel=1e-3, abs=6e-4)
    assert ("step / plan" in printed[0]) == (by == RATES)


class CountedEvent:
    """An event of a device, which counts the calls of its class."""

    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.calls["made"] += 1

    def record(self) -> None:
        self.calls["recorded"] += 1

    def elapsed_time(self, later: "CountedEvent") -> float:
        self.calls["read"] += 1
        return 1.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """A device whose calls are counted, by name."""
    calls = CountedEvent.calls = Counter()
    monkeypatch.setattr(torch, "Event", CountedEvent)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.update(["waited"]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(recorder, "wire_of", lambda group, device: device)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *tensor, group: calls.update(["met"]))
    return calls


def test_what_is_asked_of_a_device(device: Counter[str]) -> None:
    """An event before and after each action and one a step, all used anew; they are read at a log alone.

    10,000 steps without a log leave no more behind than 100, to less than a number a step.
    """
    pipeline = requested.Pipeline(named("1f1b", 2, 2), last_step=requested.LastStep(is_wanted=True))
    schedule = catalog.build("1f1b", 2, 2)
    log = StepLog(pipeline, Steps(schedule), Unobserved())  # type: ignore[arg-type]
    inputs = SimpleNamespace(model=[], group=None, microbatches=2, forward_only=False)
    actions = schedule.orders[0]
    alive = []
    for step in range(10_000):
        with log.step(inputs) as timer:  # type: ignore[arg-type]
            assert isinstance(timer, StepRecorder)
            for action in actions:
                with timer.during(action):
                    pass
        if step in (99, 9_999):
            gc.collect()
            alive.append(sum(map(sys.getsizeof, gc.get_objects())))
    events = 1 + 2 * len(actions)
    assert device == {"made": events, "recorded": 10_000 * events}
    assert alive[1] - alive[0] < 8 * 9_900

    assert isinstance(timer, StepRecorder)
    timer.since_meeting(None, torch.device("cpu"))  # type: ignore[arg-type]
    assert device["recorded"] == 10_000 * events + 1, "the meeting"
    assert device["read"] == events
    assert (device["met"], device["waited"]) == (1, 2)


class Guide(Unobserved):
    """A recording that reads the record of every recorder that it is shown."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def actions(self, inputs: Any, recorder: Any) -> Any:
        self.shown.append(recorder)
        return super().actions(inputs, recorder)


def test_the_timer_of_the_log_is_no_recording_of_a_guide() -> None:
    """Reading a record waits for the device, at the end of every step."""
    pipeline = requested.Pipeline(named("1f1b", 2, 2), last_step=requested.LastStep(is_wanted=True))
    guide, inputs = Guide(), SimpleNamespace(model=[], group=None, microbatches=2, forward_only=False)
    log = StepLog(pipeline, Steps(catalog.build("1f1b", 2, 2)), guide)  # type: ignore[arg-type]
    with log.step(inputs) as recorder, log.actions(inputs, recorder):  # type: ignore[arg-type]
        assert recorder is not None
    assert guide.shown == [None]


def test_the_peak_rate_of_a_device() -> None:
    assert system.peak_of_device("NVIDIA H200", "bf16") == 989.4e12
    assert system.peak_of_device("NVIDIA H200 NVL", "bf16") is None
    assert system.peak_of_device("NVIDIA A100 80GB PCIe", "bf16") == 312e12
    assert system.of_device("NVIDIA A100 80GB PCIe") is None, "its links are not those of the shipped system"


@pytest.mark.parametrize("name", system.shipped())
def test_every_shipped_system_has_a_device_and_its_peaks(name: str) -> None:
    """No product is measured above the data sheet's rate, by which MFU is a part of 1."""
    machine = system.read(name)
    assert name in system._BY_DEVICE.values() and machine.peak_rates
    for dtype, peak in machine.peak_rates.items():
        assert all(rate <= peak for *_, rate in machine.matrix_rates.get(dtype, ()))


def test_megatron_prints_an_iteration_by_the_name_that_is_replaced() -> None:
    assert training.print_rank_last.__wrapped__.__name__ == "print_rank_last"
