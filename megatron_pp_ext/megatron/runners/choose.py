"""The choice of the runner of this process's steps: what it is put together from, by the pipeline's modes."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core import parallel_state

from megatron_pp_ext.megatron import patching, requested
from megatron_pp_ext.megatron.core import chunk_pipelines
from megatron_pp_ext.megatron.core.chunk_pipelines import require_as_placed
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.runners.flushed import FlushedSteps, Requested, guide_of
from megatron_pp_ext.megatron.runners.pipeline_runner import (
    PipelineRunner,
    Recording,
    Unobserved,
    refuse_multimodule,
)
from megatron_pp_ext.megatron.runners.transport import LossesOnLastRank, ProcessGroups
from megatron_pp_ext.runtime.rank import print_rank_0


def measured(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a stock forward-backward function so that its steps are traced and measured as requested."""
    from megatron_pp_ext.megatron.runners.tracing import recording

    @functools.wraps(stock)
    def step(*, model: Any, forward_only: bool = False, **kwargs: Any) -> Any:
        group = parallel_state.get_pipeline_model_parallel_group()
        chunks = model if isinstance(model, list) else [model]
        measuring: AbstractContextManager[None] = nullcontext()
        if requested.require().profile is not None:
            measuring = requested.loaded().profiling(group, chunks, forward_only)
        with recording(group, chunks, forward_only), measuring:
            return stock(model=model, forward_only=forward_only, **kwargs)

    return step


@hook(
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    ("pp_size vp_size", "pp_size vp_size schedule_pg_collection"),
    "the schedule itself",
)
def choose_runner(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return this package's runner, or stock's function where no schedule is requested."""
    pipeline = requested.pipeline()
    if pipeline is None or pipeline.is_per_model:
        return StepsByModel(functools.partial(stock, *args, **kwargs))
    announce(pipeline)
    if pipeline.source is None:
        return measured(stock(*args, **kwargs))
    refuse_multimodule(*args, *kwargs.values())
    return runner(pipeline)


def _arrived(name: str) -> chunk_pipelines.Mark:
    """Return the mark of a config that was copied into this process; its steps come here from now on.

    Nothing else is put in place, so that a schedule can still be installed.
    """
    patching.apply(choose_runner.hooks)
    return chunk_pipelines.arrived(name)


chunk_pipelines.arrive_by(_arrived)


class StepsByModel:
    """A forward-backward function that runs each model by the pipeline that it was built for.

    ``stock`` returns Megatron's own.  Models of different pipelines may alternate.
    """

    def __init__(self, stock: Callable[[], Callable[..., Any]]) -> None:
        self._stock = stock

    def __call__(self, *, model: Any, **kwargs: Any) -> Any:
        chunks = model if isinstance(model, list) else [model]
        pipeline = chunk_pipelines.of_model(chunks)
        if pipeline is None:
            return self._stock()(model=model, **kwargs)
        from megatron_pp_ext.job.model_config import in_words_of_call

        with requested.using(pipeline), in_words_of_call():
            return _runner_by_model(pipeline, chunks, **kwargs)(model=model, **kwargs)


def runner_of(step: Callable[..., Any], model: Any, **kwargs: Any) -> PipelineRunner | None:
    """Return the runner of ``model`` where ``step`` has these arguments; None for Megatron's own."""
    if not isinstance(step, StepsByModel):
        return step if isinstance(step, PipelineRunner) else None
    chunks = model if isinstance(model, list) else [model]
    pipeline = chunk_pipelines.of_model(chunks)
    if pipeline is None:
        return None
    from megatron_pp_ext.job.model_config import in_words_of_call

    with requested.using(pipeline), in_words_of_call():
        return _runner_by_model(pipeline, chunks, **kwargs)


def has_run(model: Sequence[torch.nn.Module]) -> PipelineRunner | None:
    """Return the runner of the steps so far of the chunks ``model``; None under Megatron's own schedule.

    RuntimeError where no step has run.
    """
    pipeline = requested.pipeline()
    if pipeline is None or pipeline.is_per_model:
        pipeline = chunk_pipelines.of_model(model)
    if pipeline is None or pipeline.source is None:
        return None
    if not pipeline.is_per_model:
        return runner(pipeline)
    if not model or model[0] not in _runners:
        raise RuntimeError(
            "graphs hold the order of one training step, and none has run: set cuda_graph_warmup_steps to 1 "
            "or more, and capture them after these steps"
        )
    return _runners[model[0]]


def _runner_by_model(
    pipeline: requested.Pipeline, model: Sequence[torch.nn.Module], **kwargs: Any
) -> PipelineRunner:
    if model[0] not in _runners:
        _runners[model[0]] = _first_runner(pipeline, model, **kwargs)
    return _runners[model[0]]


def _first_runner(
    pipeline: requested.Pipeline,
    model: Sequence[torch.nn.Module],
    *,
    seq_length: int,
    micro_batch_size: int,
    pg_collection: Any = None,
    **unused: Any,
) -> PipelineRunner:
    """Return the runner of ``model`` before its first step; ValueError for what cannot train."""
    from megatron_pp_ext.megatron.runners.called_model import bind_to_model

    refuse_multimodule(pg_collection)
    group = pg_collection.pp if pg_collection else parallel_state.get_pipeline_model_parallel_group()
    require_as_placed(model, pipeline, group)
    bound = bind_to_model(pipeline, model, seq_length, micro_batch_size)
    announce(bound)
    return put_together(bound, _transport(pipeline))


_runners: WeakKeyDictionary[torch.nn.Module, PipelineRunner] = WeakKeyDictionary()
"""The runner of each model that has trained or was evaluated, by the model's first chunk."""


@functools.cache
def _transport(pipeline: requested.Pipeline) -> ProcessGroups:
    """Return the connections of all models of ``pipeline``, which cost memory and are made once."""
    return ProcessGroups(pipeline.settings)


@functools.lru_cache(maxsize=1)
def announce(pipeline: requested.Pipeline) -> None:
    """Print once, on rank 0, what runs and what to know about it; nothing where no flags were read."""
    if pipeline.summary and pipeline.rehearsal is None:
        print_rank_0("\n".join(filter(None, (pipeline.summary, pipeline.settings.caveat()))))


@functools.lru_cache(maxsize=1)
def runner(pipeline: requested.Pipeline) -> PipelineRunner:
    """Return the runner of all steps of the one model of this process."""
    return put_together(pipeline, ProcessGroups(pipeline.settings))


def put_together(pipeline: requested.Pipeline, transport: ProcessGroups) -> PipelineRunner:
    """Return a runner of the steps of a model under ``pipeline``, put together from its parts."""
    if pipeline.rehearsal is not None:
        return _rehearsed(pipeline)
    if pipeline.updates is not None:
        return requested.loaded().flush_free(pipeline, transport)
    losses = LossesOnLastRank(pipeline.placement, transport)
    guide = guide_of(pipeline)
    if guide is not None:
        steps = FlushedSteps(pipeline, guide, transport)
        return PipelineRunner(steps, _logged(pipeline, steps, guide), losses)
    steps = FlushedSteps(pipeline, Requested(pipeline), transport)
    if pipeline.trace is None:
        return PipelineRunner(steps, _logged(pipeline, steps, Unobserved()), losses)
    from megatron_pp_ext.megatron.runners.tracing import Tracing

    return PipelineRunner(steps, _logged(pipeline, steps, Tracing()), losses)


def _logged(pipeline: requested.Pipeline, steps: FlushedSteps, recording: Recording) -> Recording:
    """Return ``recording`` with the numbers of each step; a call may want them later than now."""
    if not (pipeline.last_step.is_wanted or pipeline.is_per_model):
        return recording
    from megatron_pp_ext.megatron.runners.step_log import StepLog

    return StepLog(pipeline, steps, recording)


def _rehearsed(pipeline: requested.Pipeline) -> PipelineRunner:
    """Return a runner of the steps of one rank without the others."""
    from megatron_pp_ext.megatron.runners.rehearsing import DummyLosses, DummyTransport, RehearsalRecording

    source, transport = Requested(pipeline), DummyTransport()
    steps = FlushedSteps(pipeline, source, transport)
    return PipelineRunner(steps, RehearsalRecording(pipeline, source, transport), DummyLosses())
