"""Schedules that are measured, compiled anew and replaced while training goes on.

--pipeline-profile-steps A-B records what the stages really cost in steps A to B.  From step B+1 on the
shortest schedule found for these costs runs, where it is predicted to be shorter than the one before.
Placement, and with it weights, checkpoints and evaluation, stay as they are, and every schedule adds up
the same gradients in the same order: the losses do not tell when the change was.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace
from statistics import median
from typing import Any

import torch.distributed as dist
from megatron.training import get_args
from megatron.training.utils import print_rank_0

from megatron_pp_ext.compiler.compile import InfeasibleLimit
from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.request.model_costs import message_bytes
from megatron_pp_ext.integration.request.sources import compile_once, least_free_bytes
from megatron_pp_ext.integration.runners import tracing
from megatron_pp_ext.integration.runners.flushed import PipelineRunner, require_same_on_all
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.runtime.executor import Recorder
from megatron_pp_ext.runtime.recorder import StepRecorder, aligned, gather
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.recorded import RankRecord, RecordedStep
from megatron_pp_ext.schedule.recorded_costs import measured_costs
from megatron_pp_ext.schedule.simulate import simulate


class GuidedRunner(PipelineRunner):
    """Runs the schedule asked for, and from some step on a better one.

    Whole backwards come in two halves, one right after the other, in the steps that are measured, to tell
    what each half takes.  The stages of the first pipeline are measured and all pipelines of the job
    follow: ranks that share the tensors of a stage must do the same.
    """

    def __init__(self, pipeline: requested.Pipeline) -> None:
        super().__init__(pipeline)
        assert pipeline.profile_steps is not None
        self._steps = pipeline.profile_steps
        self._measured_steps = 0
        self._records: list[RankRecord] = []
        self._costs: Costs | None = None
        self._asked_for: dict[tuple[int, bool], Schedule] = {}
        self._is_over = False
        self._gain = _Gain()

    def _recording(self, group: dist.ProcessGroup, inputs: StepInputs) -> Any:
        step = _current_step()
        asked = None
        if step in self._steps:
            asked = tracing.Counting.SECONDS if self._measured_steps else tracing.Counting.BYTES
        elif self._gain.is_open or (self._measured_steps and step == self._steps.last + 1):
            asked = tracing.Counting.SECONDS
        return tracing.recording(group, inputs.model, inputs.forward_only, asked=asked)

    def _run(
        self, inputs: StepInputs, group: dist.ProcessGroup, shape: Any, recorder: Recorder | None
    ) -> None:
        if inputs.forward_only:
            super()._run(inputs, group, shape, recorder)
            return
        step = _current_step()
        if step > self._steps.last and self._costs is None:
            if self._measured_steps:
                self._costs = self._measure(group)
            elif not self._is_over:
                self._is_over = True
                print_rank_0(
                    f"megatron_pp_ext: --pipeline-profile-steps {self._steps} are over in step {step}, and "
                    "none of them was run; nothing is measured"
                )
        super()._run(inputs, group, shape, recorder)
        if step in self._steps:
            self._measured_steps += 1
        if not isinstance(recorder, StepRecorder):
            return
        record = recorder.record
        seconds = record.events[-1].end - record.events[0].start
        if step in self._steps:
            self._records.append(aligned(record, group, tracing.device()))
            self._gain.before(inputs.microbatches, seconds)
        elif self._gain.is_open:
            self._gain.after(inputs.microbatches, seconds)

    def _phase(self) -> Hashable:
        is_measured = _current_step() in self._steps
        return super()._phase(), is_measured, self._costs is not None

    def _schedule(self, microbatches: int, forward_only: bool, group: dist.ProcessGroup) -> Schedule:
        if forward_only:
            return super()._schedule(microbatches, forward_only, group)
        # Kept, since under auto another moment has another amount of free memory.
        key = microbatches, self._training_steps > 0
        if key not in self._asked_for:
            self._asked_for[key] = super()._schedule(microbatches, forward_only, group)
        asked_for = self._asked_for[key]
        if self._costs is not None:
            return self._shorter(asked_for, self._costs)
        return asked_for.with_halved_backwards if _current_step() in self._steps else asked_for

    def _measure(self, group: dist.ProcessGroup) -> Costs:
        """What the stages cost by the records of the first pipeline, told to all ranks of the job."""
        told: list[Costs | None] = [None]
        gathered = gather(self._records, group) if self._records else None
        if gathered is not None:
            name, placement = self.pipeline.name, self.pipeline.placement
            steps = [RecordedStep(name, placement, step) for step in zip(*gathered, strict=True)]
            told = [replace(measured_costs(steps), message=message_bytes(get_args()))]
        self._records = []
        dist.broadcast_object_list(told, src=0)
        (costs,) = told
        assert costs is not None
        return costs

    def _shorter(self, asked_for: Schedule, costs: Costs) -> Schedule:
        """The schedule to go on with for as many microbatches, and a line about it in the log."""
        source = self.pipeline.source
        assert source is not None and source.limits is not None
        before = simulate(asked_for, costs).makespan
        limits, counted = source.limits(costs, asked_for, least_free_bytes)
        about = f"megatron_pp_ext: m = {asked_for.microbatches}, measured in steps {self._steps}"
        try:
            found = compile_once(
                asked_for.ranks,
                asked_for.microbatches,
                counted,
                limits,
                [asked_for.placement],
            )
        except InfeasibleLimit as error:
            print_rank_0(f"{about}: {source.name} stays, {error}")
            return asked_for
        after = simulate(found, costs).makespan
        if after >= before:
            print_rank_0(f"{about}: {source.name} stays, predicted to take {1e3 * before:.4g} ms")
            return asked_for
        world = dist.group.WORLD
        assert world is not None
        require_same_on_all(found)
        print_rank_0(
            f"{about}: predicted {1e3 * before:.4g} ms with {source.name}, {1e3 * after:.4g} ms with the "
            f"compiled schedule ({_change(before, after)}), which runs from now on"
        )
        self._gain.open(self._steps.number)
        return found


class _Gain:
    """What the new schedule brought, in seconds from the first action of rank 0 to its last."""

    def __init__(self) -> None:
        self._before: defaultdict[int, list[float]] = defaultdict(list)
        self._after: defaultdict[int, list[float]] = defaultdict(list)
        self._to_come: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether steps under the new schedule are being measured."""
        return bool(self._to_come)

    def open(self, steps: int) -> None:
        """The new schedule begins: measure as many ``steps``, once."""
        if self._to_come is None:
            self._to_come = steps

    def before(self, microbatches: int, seconds: float) -> None:
        """A step of the old schedule took ``seconds``."""
        self._before[microbatches].append(seconds)

    def after(self, microbatches: int, seconds: float) -> None:
        """A step of the new schedule took ``seconds``; the last one is followed by a line in the log."""
        assert self._to_come is not None
        self._after[microbatches].append(seconds)
        self._to_come -= 1
        if not self._to_come:
            for number, times in self._after.items():
                print_rank_0(f"megatron_pp_ext: m = {number}: {self._tell(number, times)}")

    def _tell(self, microbatches: int, times: list[float]) -> str:
        after = median(times)
        if microbatches not in self._before:
            return f"measured {1e3 * after:.4g} ms under the compiled schedule, and never before it"
        # Bytes were counted in the first one, which took time.
        before = median(self._before[microbatches][1:] or self._before[microbatches])
        return (
            f"measured {1e3 * before:.4g} ms before and {1e3 * after:.4g} ms under the compiled schedule "
            f"({_change(before, after)})"
        )


def _change(before: float, after: float) -> str:
    return f"{abs(1 - after / before):.1%} {'shorter' if after <= before else 'longer'}"


def _current_step() -> int:
    """The training step that runs or, in an evaluation, the last one, if any; counted from 1."""
    return int(getattr(get_args(), "curr_iteration", -1)) + 1
