"""Training steps whose schedule is compiled anew, from measured costs, while training goes on."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch.distributed as dist

from megatron_pp_ext.compiler.limits import InfeasibleLimit
from megatron_pp_ext.features.guided.order import ProfileSteps, shorter
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core.free_memory import free_bytes_by_rank
from megatron_pp_ext.megatron.runners import tracing
from megatron_pp_ext.megatron.runners.flushed import Requested, require_same_schedule
from megatron_pp_ext.megatron.runners.model_stage import StepInputs
from megatron_pp_ext.megatron.runners.transport import device
from megatron_pp_ext.runtime.rank import Recorder, print_rank_0
from megatron_pp_ext.runtime.recorder import StepRecorder, aligned, gather
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.recorded import RankRecord, RecordedStep, costs_by_microbatch, measured_costs
from megatron_pp_ext.schedule.simulate import simulate


class ProfileGuide(Requested):
    """Gives the requested schedule, and after the measured steps a better one if there is one.

    It is the source of schedules and the recording too.  In the measured steps whole backwards come in two
    halves, one right after the other, so that each half has a duration.  Only the first pipeline of the job
    is measured, and all change together: ranks that share the tensors of a stage must run the same schedule.

    --pipeline-profile-steps A-B measures the costs of the stages in steps A to B.  From step B+1 on the
    shortest schedule found for these costs runs, if it is predicted to be shorter than the requested one.
    The placement stays, and with it weights, checkpoints and evaluation.  Every schedule adds up the same
    gradients in the same order, so the change leaves no trace in the losses, but for dropout where ranks have
    several chunks: its masks follow the order in which these run, and the start-up line reports it.  Where
    another layout would make a shorter pipeline, a line advises it for the next start.
    """

    def __init__(self, pipeline: requested.Pipeline, steps: ProfileSteps) -> None:
        super().__init__(pipeline)
        self._pipeline, self._steps, self._settings = pipeline, steps, pipeline.settings
        self._measured_steps = 0
        self._records: dict[int, RankRecord] = {}
        self._by_microbatch: dict[int, tuple[Costs, ...]] = {}
        self._costs: Costs | None = None
        self._has_warned = False
        self._durations = _StepDurations()

    def _current_step(self, inputs: StepInputs) -> int:
        """Return the number, from 1, of the training step that runs."""
        return self._settings.steps_done(inputs.training_steps) + 1

    def step(self, inputs: StepInputs) -> Any:
        step = self._current_step(inputs)
        counting = None
        if step in self._steps:
            counting = tracing.Counting.SECONDS if self._measured_steps else tracing.Counting.BYTES
        elif self._durations.is_waiting or (self._measured_steps and step == self._steps.last + 1):
            counting = tracing.Counting.SECONDS
        return tracing.recording(inputs.group, inputs.model, inputs.forward_only, counting=counting)

    @contextmanager
    def actions(self, inputs: StepInputs, recorder: Recorder | None) -> Iterator[None]:
        if inputs.forward_only:
            yield
            return
        step = self._current_step(inputs)
        if step > self._steps.last and self._costs is None:
            self._end_of_measurement(step, inputs.group)
        yield
        if step in self._steps:
            self._measured_steps += 1
        if not isinstance(recorder, StepRecorder):
            return
        record = recorder.record
        seconds = record.events[-1].end - record.events[0].start
        if step in self._steps:
            self._records[inputs.training_steps] = aligned(record, inputs.group, device())
            self._durations.add_before(inputs.microbatches, seconds)
        elif self._durations.is_waiting:
            self._durations.add_after(inputs.microbatches, seconds)

    def phase(self, inputs: StepInputs) -> Hashable:
        return super().phase(inputs), self._current_step(inputs) in self._steps, self._costs is not None

    def schedule(self, inputs: StepInputs) -> Schedule:
        schedule = super().schedule(inputs)
        if self._costs is not None:
            return self._shorter(schedule, self._costs, inputs)
        return schedule.with_halved_backwards if self._current_step(inputs) in self._steps else schedule

    @property
    def measured(self) -> Mapping[int, Sequence[Costs]]:
        return self._by_microbatch

    @property
    def stage_costs(self) -> Costs | None:
        return self._costs

    def _end_of_measurement(self, step: int, group: dist.ProcessGroup) -> None:
        if self._measured_steps:
            self._costs = self._measure(group)
            self._advise(self._costs)
        elif not self._has_warned:
            self._has_warned = True
            print_rank_0(
                f"megatron_pp_ext: --pipeline-profile-steps {self._steps} are over in step {step}, and "
                "none of them was run; nothing is measured"
            )

    def _measure(self, group: dist.ProcessGroup) -> Costs:
        """Return, on all ranks of the job, the costs measured in the first pipeline; collective."""
        measured: list[Any] = [None, {}]
        numbers = list(self._records)
        gathered = gather(list(self._records.values()), group) if numbers else None
        if gathered is not None:
            name, placement = self._pipeline.name, self._pipeline.placement
            steps = [RecordedStep(name, placement, step) for step in zip(*gathered, strict=True)]
            # Counting bytes takes time in the first step.
            timed = list(zip(numbers, steps, strict=True))[1:] or zip(numbers, steps, strict=True)
            measured = [
                replace(measured_costs(steps), message=self._settings.message_bytes()),
                {number: costs_by_microbatch(step) for number, step in timed},
            ]
        self._records = {}
        dist.broadcast_object_list(measured, src=0)
        costs, self._by_microbatch = measured
        assert isinstance(costs, Costs)
        return costs

    def _advise(self, costs: Costs) -> None:
        """Log a better layout for the next start, if there is one; collective."""
        advice, free = self._settings.advice, min(free_bytes_by_rank())
        if dist.get_rank() > 0 or advice is None:
            return
        schedule = self._source.ordinary
        try:
            better = advice(costs, schedule, self._pipeline.name, free)
        except ValueError:  # any model may train, also one that the estimate does not know
            return
        if better is not None:
            layout, times = better
            print_rank_0(
                f"megatron_pp_ext: measured in steps {self._steps}: at the next start "
                f"--pipeline-model-parallel-layout '{layout}' makes the pipeline {times.gain:.1%} shorter by "
                f"simulation ({1e3 * times.before:.4g} to {1e3 * times.makespan:.4g} ms)"
            )

    def _shorter(self, current: Schedule, costs: Costs, inputs: StepInputs) -> Schedule:
        """Return the schedule to go on with, a compiled one or ``current``, and log which; collective."""
        source = self._source
        before = simulate(current, costs).makespan
        free = self._measured_once() if self._measures_memory else ()
        about = f"megatron_pp_ext: m = {current.microbatches}, measured in steps {self._steps}"
        try:
            schedule = shorter(source, current, costs, free)
        except InfeasibleLimit as error:
            print_rank_0(f"{about}: {source.name} stays, {error}")
            return current
        after = simulate(schedule, costs).makespan
        if after >= before:
            print_rank_0(f"{about}: {source.name} stays, predicted to take {1e3 * before:.4g} ms")
            return current
        require_same_schedule(schedule, inputs.groups)
        print_rank_0(
            f"{about}: predicted {1e3 * before:.4g} ms with {source.name}, {1e3 * after:.4g} ms with the "
            f"compiled schedule ({_change(before, after)}), which runs from now on"
        )
        self._durations.wait_for(self._steps.number)
        return schedule


class _StepDurations:
    """Compares steps before and after the change, in seconds from the first action of rank 0 to its last."""

    def __init__(self) -> None:
        self._before: defaultdict[int, list[float]] = defaultdict(list)
        self._after: defaultdict[int, list[float]] = defaultdict(list)
        self._to_come: int | None = None

    @property
    def is_waiting(self) -> bool:
        return bool(self._to_come)

    def wait_for(self, steps: int) -> None:
        """Measure ``steps`` steps from now on; only the first call counts."""
        if self._to_come is None:
            self._to_come = steps

    def add_before(self, microbatches: int, seconds: float) -> None:
        self._before[microbatches].append(seconds)

    def add_after(self, microbatches: int, seconds: float) -> None:
        """Add a step under the new schedule; the last one to come is followed by a line in the log."""
        assert self._to_come is not None
        self._after[microbatches].append(seconds)
        self._to_come -= 1
        if not self._to_come:
            for number, times in self._after.items():
                print_rank_0(f"megatron_pp_ext: m = {number}: {self._comparison(number, times)}")

    def _comparison(self, microbatches: int, times: list[float]) -> str:
        after = median(times)
        if microbatches not in self._before:
            return f"measured {1e3 * after:.4g} ms under the compiled schedule, and never before it"
        # The first step was slower than the others, as its bytes were counted.
        before = median(self._before[microbatches][1:] or self._before[microbatches])
        return (
            f"measured {1e3 * before:.4g} ms before and {1e3 * after:.4g} ms under the compiled schedule "
            f"({_change(before, after)})"
        )


def _change(before: float, after: float) -> str:
    return f"{abs(1 - after / before):.1%} {'shorter' if after <= before else 'longer'}"
