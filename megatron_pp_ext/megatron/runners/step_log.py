"""The measured numbers of the last training step: bubble, activations, and its time against the plan."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.megatron.runners.flushed import FlushedSteps
from megatron_pp_ext.megatron.runners.model_stage import StepInputs
from megatron_pp_ext.megatron.runners.pipeline_runner import Recording
from megatron_pp_ext.megatron.runners.transport import device
from megatron_pp_ext.megatron.step_numbers import BUBBLE, MEASURED, PEAK, PEAK_TO_PLAN, RATES, STEP_TO_PLAN
from megatron_pp_ext.runtime.rank import Recorder
from megatron_pp_ext.runtime.recorder import StepRecorder, numbers_of_all
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.simulate import Timeline, simulate


class _RankNumbers(NamedTuple):
    """The numbers of one rank: seconds, and its times on the clock of all."""

    busy: float
    start: float
    end: float
    peak_bytes: float
    is_as_planned: float
    """1 where the rank ran the order of its schedule, and 0 where a feature has changed it for the step."""


class _Step(NamedTuple):
    """A training step that ran."""

    recorder: StepRecorder
    schedule: Schedule
    group: dist.ProcessGroup


class _Plan(NamedTuple):
    """The seconds of a planned step, and what they follow from (``LastStep.plan_by``)."""

    seconds: float
    by: str


class StepLog:
    """A ``pipeline_runner.Recording`` that times every training step, besides ``recording``, which may not.

    Nothing waits for the device within a step, nor before or after it: actions have events, which are read
    when somebody wants the numbers.  Bytes are counted in the first step of each schedule alone, since
    counting takes time in every forward.  A step that is captured has no times of its own.

    Where ``recording`` records a step, the numbers are those of its record.
    """

    def __init__(self, pipeline: Pipeline, steps: FlushedSteps, recording: Recording) -> None:
        self._pipeline, self._steps, self._recording = pipeline, steps, recording
        self._timer: StepRecorder | None = None
        self._peaks: dict[Schedule, float] = {}
        self._of_microbatches: dict[int, Schedule] = {}
        self._last: _Step | None = None
        self._planned_peak = functools.lru_cache(maxsize=8)(self._peak)
        self._planned_seconds = functools.lru_cache(maxsize=8)(self._seconds)

    @contextmanager
    def step(self, inputs: StepInputs) -> Iterator[Recorder | None]:
        with ExitStack() as stack:
            recorder = stack.enter_context(self._recording.step(inputs))
            is_timed = self._pipeline.last_step.is_wanted and not inputs.forward_only
            if is_timed:
                self._last = None
                self._pipeline.last_step.numbers = self.numbers
                if recorder is None and not _is_captured():
                    recorder = stack.enter_context(self._timed(inputs))
            yield recorder
            if is_timed and isinstance(recorder, StepRecorder):
                schedule = self._steps.schedule(inputs)
                self._of_microbatches[inputs.microbatches] = schedule
                if recorder.meter.peak_bytes:
                    self._peaks[schedule] = recorder.meter.peak_bytes
                self._last = _Step(recorder, schedule, inputs.group)

    def actions(self, inputs: StepInputs, recorder: Recorder | None) -> AbstractContextManager[None]:
        return self._recording.actions(inputs, None if recorder is self._timer else recorder)

    @contextmanager
    def _timed(self, inputs: StepInputs) -> Iterator[StepRecorder]:
        if self._timer is None:
            parameters = (p for chunk in inputs.model for p in chunk.parameters())
            self._timer = StepRecorder(parameters, waits=False)
        self._timer.forget()
        is_metered = self._of_microbatches.get(inputs.microbatches) not in self._peaks
        with self._timer.step(metered=is_metered):
            yield self._timer

    def numbers(self) -> dict[str, float]:
        """Return the numbers of the last training step by name; none if it was captured, or has not ended.

        Collective over the pipeline, and the host waits for the device.  The bubble is the idle part of
        ranks x time, from the first start of an action of any rank to the last end; the peak is that of the
        rank with the highest.  What is compared with the plan is left out where nobody knows the plan: its
        bytes without an estimate of the model; its seconds where the user gave no costs, no steps of this run
        were measured, and the planner has no rates of the device.
        """
        if self._last is None:
            return {}
        recorder, schedule, group = self._last
        record = recorder.since_meeting(group, device())
        is_as_planned = tuple(event.action for event in record.events) == schedule.orders[group.rank()]
        this_rank = _RankNumbers(
            busy=record.busy,
            start=min(event.start for event in record.events),
            end=max(event.end for event in record.events),
            peak_bytes=self._peaks.get(schedule, 0.0),
            is_as_planned=is_as_planned,
        )
        ranks = [_RankNumbers(*numbers) for numbers in numbers_of_all(this_rank, group, device())]
        seconds = max(rank.end for rank in ranks) - min(rank.start for rank in ranks)
        peak = max(rank.peak_bytes for rank in ranks)
        numbers = {BUBBLE: 1 - sum(rank.busy for rank in ranks) / (len(ranks) * seconds)}
        if peak:
            numbers[PEAK] = peak
        if not all(rank.is_as_planned for rank in ranks):
            return numbers
        if peak and (planned := self._planned_peak(schedule)):
            numbers[PEAK_TO_PLAN] = peak / planned
        if plan := self._planned_seconds(schedule, self._steps.stage_costs is not None):
            numbers[STEP_TO_PLAN] = seconds / plan.seconds
            self._pipeline.last_step.plan_by = plan.by
        return numbers

    def _peak(self, schedule: Schedule) -> float | None:
        """Return the bytes of the rank with most activations by the estimate of the model; None without."""
        timeline = self._simulated(schedule, self._pipeline.settings.estimate)
        return None if timeline is None else max(timeline.peak_activations)

    def _seconds(self, schedule: Schedule, is_measured: bool) -> _Plan | None:
        """Return the plan by the costs of the user, else by those measured in this run, else by rates.

        None where nobody knows seconds: unit costs, with which the papers draw, are none.
        """
        settings = self._pipeline.settings
        by_user = self._simulated(schedule, settings.seconds)
        if by_user is not None:
            return _Plan(by_user.makespan, "")
        costs = self._steps.stage_costs if is_measured and not schedule.units else None
        try:
            if costs is not None:
                return _Plan(simulate(schedule, costs).makespan, MEASURED)
            seconds = settings.seconds_by_rates(schedule, torch.cuda.get_device_name())
        except Exception:  # as in _simulated
            return None
        return None if seconds is None else _Plan(seconds, RATES)

    def _simulated(self, schedule: Schedule, model: CostModel | None) -> Timeline | None:
        """Return the step in the costs of ``model``, whatever their unit; None for unit costs or without."""
        if model is None:
            return None
        try:
            costs = self._pipeline.costs_of(schedule, model)
            is_of_units = costs == Costs.unit(self._pipeline.placement)
            return None if is_of_units else simulate(schedule, costs)
        except Exception:  # a job trains whatever is wrong with an estimate that it does not need
            return None


def _is_captured() -> bool:
    """Whether the device captures what is launched now, to replay it as a CUDA graph."""
    return torch.accelerator.is_available() and torch.cuda.is_current_stream_capturing()
