"""The recording of a training step, under our schedules and under stock's, and its trace.

The executor reports the actions of our schedules.  Stock's schedules have none, so their actions are reported
where they call ``forward_step`` and ``backward_step``.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pp_ext.around import bound
from megatron_pp_ext.files import going_on_without
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.runners.model_stage import StepInputs
from megatron_pp_ext.megatron.runners.transport import device
from megatron_pp_ext.runtime.activation_meter import keep_shape
from megatron_pp_ext.runtime.rank import Recorder
from megatron_pp_ext.runtime.recorder import StepRecorder, aligned, gather
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.formats import trace_file

_recorder: StepRecorder | None = None
"""The recorder of the running step; None where it is not recorded."""

_backward_of: dict[int, Action] = {}
"""Stock's backwards, by the identity of their forward's output: it is all that ``backward_step`` gets."""

_chunk_of: dict[int, int] = {}
"""The chunk of each group of gradient buckets, by the group's identity."""


@contextmanager
def reporting_to(recorder: StepRecorder, model: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Report the actions of the chunks of ``model`` to ``recorder`` within the context."""
    global _recorder
    _recorder = recorder
    _chunk_of.update(
        (id(group), number)
        for number, chunk in enumerate(model)
        for group in (
            *getattr(chunk, "bucket_groups", ()),
            *getattr(chunk, "expert_parallel_bucket_groups", ()),
        )
    )
    try:
        yield
    finally:
        _recorder = None
        _backward_of.clear()
        _chunk_of.clear()


def recorder() -> StepRecorder | None:
    """Return the recorder of the running step; None where it is not recorded."""
    return _recorder


_STOCK = "megatron.core.pipeline_parallel.schedules"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_BACKWARD = "input_tensor output_tensor output_tensor_grad"
_OF_STOCK, _OF_REDUCTION = "--pipeline-trace of stock's schedules", "--pipeline-trace of gradient reduction"


@hook(
    f"{_STOCK}:forward_step",
    "forward_step_func data_iterator model num_microbatches input_tensor "
    "forward_data_store config cp_group_size collect_non_loss_data "
    "checkpoint_activations_microbatch is_first_microbatch current_microbatch vp_stage is_last_stage",
    _OF_STOCK,
)
def record_forward(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Report stock's forwards."""
    recording = _recorder_of_stock()
    if recording is None:
        return stock(*args, **kwargs)
    placement = requested.require().placement
    rank = parallel_state.get_pipeline_model_parallel_rank()
    stage = placement.stage_of(rank, kwargs.get("vp_stage") or 0)
    arguments = bound(stock, *args, **kwargs).arguments
    microbatch, received, config = (
        arguments["current_microbatch"],
        arguments["input_tensor"],
        arguments["config"],
    )
    for tensor in received if isinstance(received, list) else [received]:
        if tensor is not None and config.distribute_saved_activations:
            keep_shape(tensor)
    with recording.during(Action(stage, Kind.F, microbatch)):
        output, tokens = stock(*args, **kwargs)
    _backward_of[_key(output)] = Action(stage, Kind.B, microbatch)
    return output, tokens


@hook(f"{_STOCK}:backward_step", (f"{_BACKWARD} config", f"{_BACKWARD} model_type config"), _OF_STOCK)
def record_backward(
    stock: Callable[..., Any], input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any
) -> Any:
    """Report stock's backwards."""
    recording = _recorder_of_stock()
    if recording is None:
        return stock(input_tensor, output_tensor, *args, **kwargs)
    with recording.during(_backward_of.pop(_key(output_tensor))):
        return stock(input_tensor, output_tensor, *args, **kwargs)


@hook(f"{_BUCKETS}.start_grad_sync", ("self force_all_reduce", "self"), _OF_REDUCTION)
def record_reduction_start(stock: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
    """Report when a reduction of gradients begins."""
    if _recorder is not None:
        _recorder.reduction_started(id(group))
    return stock(group, *args, **kwargs)


@hook(f"{_BUCKETS}.finish_grad_sync", ("self force_all_reduce", "self"), _OF_REDUCTION)
def record_reduction_end(stock: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
    """Report when the step has waited for it."""
    result = stock(group, *args, **kwargs)
    if _recorder is not None:
        _recorder.reduction_ended(id(group), _chunk_of[id(group)])
    return result


def _key(output: Any) -> int:
    # Stock's 1F1B passes lists of one tensor, its interleaved schedule the tensor.
    return id(output[0] if isinstance(output, list) else output)


def _recorder_of_stock() -> StepRecorder | None:
    """Return the recorder if stock's schedule runs; the executor reports the actions of ours."""
    return _recorder if _recorder is not None and requested.require().source is None else None


_step_recorder: StepRecorder | None = None
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
    global _step_recorder
    pipeline = requested.require()
    if (pipeline.trace is None and counting is None) or forward_only or not is_first_pipeline(group):
        yield None
        return
    if part == 0 or _step_recorder is None:
        _step_recorder = _step_recorder or StepRecorder(p for chunk in model for p in chunk.parameters())
        _step_recorder.forget()
    is_metered = pipeline.trace is not None or counting is Counting.BYTES
    with reporting_to(_step_recorder, model), _step_recorder.step(metered=is_metered):
        yield _step_recorder
    if pipeline.trace is None or part < parts - 1:
        return
    records = gather(aligned(_step_recorder.record, group, device()), group)
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
