"""Recording a training step, under our schedules and under stock's, and writing its trace."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto

import torch
import torch.distributed as dist

from megatron_pp_ext.files import going_on_without
from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.core.action_recording import reporting_to
from megatron_pp_ext.integration.runners.message_groups import device
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.runtime.rank import Recorder
from megatron_pp_ext.runtime.recorder import StepRecorder, aligned, gather
from megatron_pp_ext.schedule.formats import trace_file

_recorder: StepRecorder | None = None
"""The one recorder of all steps: a microbatch may begin in one step and end in the next."""


class Counting(Enum):
    """The quantities that a runner itself needs: seconds, or bytes as well, whose counting takes time."""

    SECONDS = auto()
    BYTES = auto()


def is_first_pipeline(group: dist.ProcessGroup) -> bool:
    """Whether the pipeline ``group`` has global rank 0; no other one is recorded or profiled."""
    return dist.get_process_group_ranks(group)[0] == 0


@contextmanager
def recording(
    group: dist.ProcessGroup,
    model: list[torch.nn.Module],
    forward_only: bool,
    *,
    part: int = 0,
    parts: int = 1,
    counting: Counting | None = None,
) -> Iterator[StepRecorder | None]:
    """Record a training step if --pipeline-trace or ``counting`` requests it; write the trace at its end.

    Every step replaces the file, so that it holds the last one; or ``parts`` steps do, of which
    this is number ``part``.  Only the pipeline of global rank 0 is recorded.
    """
    global _recorder
    pipeline = requested.require()
    if (pipeline.trace is None and counting is None) or forward_only or not is_first_pipeline(group):
        yield None
        return
    if part == 0 or _recorder is None:
        _recorder = _recorder or StepRecorder(p for chunk in model for p in chunk.parameters())
        _recorder.forget()
    is_metered = pipeline.trace is not None or counting is Counting.BYTES
    with reporting_to(_recorder, model), _recorder.step(metered=is_metered):
        yield _recorder
    if pipeline.trace is None or part < parts - 1:
        return
    records = gather(aligned(_recorder.record, group, device()), group)
    if records is not None:
        with going_on_without(pipeline.trace):
            trace_file.write(pipeline.trace, pipeline.name, pipeline.placement, records)


class Tracing:
    """Records the trace that --pipeline-trace requests; a ``pipeline_runner.Recording``.

    ``part`` returns the number of the step that comes, and the number of steps, of one trace.
    """

    def __init__(self, part: Callable[[], tuple[int, int]] = lambda: (0, 1)) -> None:
        self._part = part

    def step(self, inputs: StepInputs) -> AbstractContextManager[StepRecorder | None]:
        part, parts = self._part()
        return recording(inputs.group, inputs.model, inputs.forward_only, part=part, parts=parts)

    def actions(self, inputs: StepInputs, recorder: Recorder | None) -> AbstractContextManager[None]:
        return nullcontext()
