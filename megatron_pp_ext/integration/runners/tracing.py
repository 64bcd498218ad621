"""Recording what the ranks of a pipeline really did, under our schedules and under stock's.

Stock's schedules have no executor to listen to: their actions are heard where they call
``forward_step`` and ``backward_step``.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pp_ext.integration import requested
from megatron_pp_ext.runtime.recorder import StepRecorder, aligned, gather
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.view import trace_file

_recorder: StepRecorder | None = None
"""The recorder of the step that is running, if it is recorded."""

_lasting: StepRecorder | None = None
"""The recorder of all steps: what is in flight between two of them, it has seen set out."""

_backward_of: dict[int, Action] = {}
"""Stock's backward gets the output of a forward, which is all that tells whose it is."""

_chunk_of: dict[int, int] = {}
"""The chunk of each group of gradient buckets, by the group's identity."""


class Counting(Enum):
    """What a recording is asked for beside the trace: seconds alone, or bytes as well, which takes time."""

    SECONDS = auto()
    BYTES = auto()


def is_recorded(group: dist.ProcessGroup) -> bool:
    """Whether the pipeline ``group`` is the one of which recordings are made: that of global rank 0."""
    return dist.get_process_group_ranks(group)[0] == 0


def device() -> torch.device:
    """Where tensors have to be for Megatron's groups to send them."""
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def recording(
    group: dist.ProcessGroup,
    model: list[torch.nn.Module],
    forward_only: bool,
    *,
    part: int = 0,
    parts: int = 1,
    asked: Counting | None = None,
) -> Iterator[StepRecorder | None]:
    """Record a training step if --pipeline-trace, or the caller, asks for it; write the trace at its end.

    Every step replaces the file, so that it holds the last one; or ``parts`` steps do, of which
    this is number ``part``.  Only the pipeline of global rank 0 is recorded.
    """
    global _recorder, _lasting
    pipeline = requested.require()
    if (pipeline.trace is None and asked is None) or forward_only or not is_recorded(group):
        yield None
        return
    if part == 0 or _lasting is None:
        _lasting = _lasting or StepRecorder(p for chunk in model for p in chunk.parameters())
        _lasting.forget()
    _recorder = _lasting
    _chunk_of.update(
        (id(group), number)
        for number, chunk in enumerate(model)
        for group in (
            *getattr(chunk, "bucket_groups", ()),
            *getattr(chunk, "expert_parallel_bucket_groups", ()),
        )
    )
    records = None
    try:
        with _recorder.step(metered=pipeline.trace is not None or asked is Counting.BYTES):
            yield _recorder
        if pipeline.trace is not None and part == parts - 1:
            records = gather(aligned(_recorder.record, group, device()), group)
    finally:
        _recorder = None
        _backward_of.clear()
        _chunk_of.clear()
    if records is not None and pipeline.trace is not None:
        with going_on_without(pipeline.trace):
            trace_file.write(pipeline.trace, pipeline.name, pipeline.placement, records)


@contextmanager
def going_on_without(path: Path) -> Iterator[None]:
    """Train on where ``path`` cannot be written, and say so once: what is looked at must not end a run."""
    try:
        yield
    except OSError as error:
        _say_once(f"megatron_pp_ext: {path} cannot be written ({error.strerror or error}); training goes on")


@functools.cache
def _say_once(line: str) -> None:
    print(line, flush=True)


def traced_step(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Record the steps of a stock forward-backward function."""

    @functools.wraps(stock)
    def step(*, model: Any, forward_only: bool = False, **kwargs: Any) -> Any:
        chunks = model if isinstance(model, list) else [model]
        with recording(parallel_state.get_pipeline_model_parallel_group(), chunks, forward_only):
            return stock(model=model, forward_only=forward_only, **kwargs)

    return step


def record_forward(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Hear stock's forwards.  Seam: ``forward_step`` in ``megatron.core.pipeline_parallel.schedules``."""

    @functools.wraps(stock)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        if not _hears_stock():
            return stock(*args, **kwargs)
        assert _recorder is not None
        placement = requested.require().placement
        rank = parallel_state.get_pipeline_model_parallel_rank()
        stage = placement.stage_of(rank, kwargs.get("vp_stage") or 0)
        microbatch = kwargs["current_microbatch"]
        with _recorder.during(Action(stage, Kind.F, microbatch)):
            output, tokens = stock(*args, **kwargs)
        _backward_of[_key(output)] = Action(stage, Kind.B, microbatch)
        return output, tokens

    return forward_step


def record_backward(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Hear stock's backwards.  Seam: ``backward_step``, beside ``forward_step``."""

    @functools.wraps(stock)
    def backward_step(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not _hears_stock():
            return stock(input_tensor, output_tensor, *args, **kwargs)
        assert _recorder is not None
        with _recorder.during(_backward_of.pop(_key(output_tensor))):
            return stock(input_tensor, output_tensor, *args, **kwargs)

    return backward_step


def record_reduction_start(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Hear when gradients set out.  Seam: ``_ParamAndGradBucketGroup.start_grad_sync``."""

    @functools.wraps(stock)
    def start_grad_sync(group: Any, *args: Any, **kwargs: Any) -> Any:
        if _recorder is not None:
            _recorder.reduction_started(id(group))
        return stock(group, *args, **kwargs)

    return start_grad_sync


def record_reduction_end(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Hear when they are home.  Seam: ``_ParamAndGradBucketGroup.finish_grad_sync``."""

    @functools.wraps(stock)
    def finish_grad_sync(group: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(group, *args, **kwargs)
        if _recorder is not None:
            _recorder.reduction_ended(id(group), _chunk_of[id(group)])
        return result

    return finish_grad_sync


def _key(output: Any) -> int:
    # Stock's 1F1B passes lists of one tensor, its interleaved schedule the tensor.
    return id(output[0] if isinstance(output, list) else output)


def _hears_stock() -> bool:
    return _recorder is not None and requested.require().source is None
