"""The choice of the runner of this process's steps, and the binding of a requested pipeline to its model."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config, get_te_version

from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.costs.stages import cost_model, stage_costs
from megatron_pp_ext.job import options
from megatron_pp_ext.job.model_config import arguments, in_words_of_call
from megatron_pp_ext.job.pipeline import require_trainable
from megatron_pp_ext.job.requested_job import ENGINE, RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.megatron import patching, requested
from megatron_pp_ext.megatron.core import chunk_pipelines
from megatron_pp_ext.megatron.core.chunk_pipelines import part_of, require_as_placed
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.megatron.runners.flushed import FlushedSteps, Requested, guide_of
from megatron_pp_ext.megatron.runners.pipeline_runner import PipelineRunner, refuse_multimodule
from megatron_pp_ext.megatron.runners.rehearsing import DummyLosses, DummyTransport, RehearsalRecording
from megatron_pp_ext.megatron.runners.tracing import Tracing, recording
from megatron_pp_ext.megatron.runners.transport import LossesOnLastRank, ProcessGroups
from megatron_pp_ext.runtime.rank import print_rank_0
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.placement import Placement


def bind_to_model(
    pipeline: Pipeline, model: Sequence[torch.nn.Module], sequence: int, microbatch: int
) -> Pipeline:
    """Return ``pipeline`` as the chunks ``model`` need it; ValueError where it cannot train them.

    A step has ``microbatch`` samples of ``sequence`` tokens in a microbatch.

    A call of ``install`` knows no model.  Before the first step there is one: its config and that of its data
    parallelism are held against the rules for flags, costs follow from its sizes where none were given, and
    features read what the config asks of them.
    """
    request, config = pipeline.request, get_model_config(model[0])
    of_part = partial(getattr, part_of(model[0]))
    longest = of_part("max_sequence_length", sequence)
    explicit: Any = {
        "pipeline_schedule": request.schedule,
        "pipeline_model_parallel_size": pipeline.placement.ranks,
        **options.as_flags(request),
        "pipeline_memory_limit": request.limit,
        "pipeline_costs": pipeline.costs,
        "pipeline_trace": pipeline.trace,
        "pipeline_unproved": pipeline.is_unproved,
        "micro_batch_size": microbatch,
        "global_batch_size": microbatch * request.microbatches,
        "seq_length": longest if config.variable_seq_lengths else sequence,
        "max_position_embeddings": longest,
        "padded_vocab_size": of_part("vocab_size", None),
        "position_embedding_type": of_part("position_embedding_type", "rope"),
        "untie_embeddings_and_output_weights": not of_part("share_embeddings_and_output_weights", False),
        "transformer_impl": "transformer_engine" if any(map(_is_of_engine, model)) else "local",
        "hybrid_layer_pattern": of_part("hybrid_layer_pattern", None),
    }
    args = arguments(config, getattr(model[0], "ddp_config", None), **explicit)
    job = RequestedJob.of_args(
        args,
        {ENGINE: str(get_te_version())},
        placement=pipeline.placement,
        chunks=pipeline.placement.chunks,
        from_file=request.from_file,
    )
    job = job.with_arguments(**options.chosen(job, lambda _: request, lambda: job.padded_vocabulary))
    request = options.read(job, request)
    job = replace(job, splits=request.may_split_backward)
    all_rules.refuse_model(job)
    if request.from_file is not None:
        require_trainable(request.from_file, job)
    estimate = cost_model(job, _estimate)
    needs_costs = pipeline.costs is None and catalog.abilities(request.schedule).is_compiled
    pipeline = replace(pipeline, settings=replace(pipeline.settings, estimate=estimate))
    if request.options == pipeline.request.options and not needs_costs:
        return pipeline

    costs = estimate if pipeline.costs is None else CostModel.fixed(pipeline.costs)
    placed = replace(pipeline.placement, splits_head=False)
    request = replace(request, placements=(placed,))
    added = (option.about for option in request.options if option not in pipeline.request.options)
    summary = "; ".join(filter(None, (pipeline.summary, *added)))
    return replace(pipeline, request=request, source=Source(request, costs), summary=summary)


def _estimate(job: RequestedJob, placement: Placement) -> Costs:
    all_rules.refuse_to_predict(job)
    return stage_costs(job, placement, job.padded_vocabulary)


def _is_of_engine(chunk: torch.nn.Module) -> bool:
    """Whether ``chunk`` has a layer of Transformer Engine, independent of its config."""
    return any("transformer_engine" in type(part).__module__ for part in chunk.modules())


def measured(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a stock forward-backward function so that its steps are traced and measured as requested."""

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
        return PipelineRunner(FlushedSteps(pipeline, guide, transport), guide, losses)
    return PipelineRunner(FlushedSteps(pipeline, Requested(pipeline), transport), Tracing(), losses)


def _rehearsed(pipeline: requested.Pipeline) -> PipelineRunner:
    """Return a runner of the steps of one rank without the others."""
    source, transport = Requested(pipeline), DummyTransport()
    steps = FlushedSteps(pipeline, source, transport)
    return PipelineRunner(steps, RehearsalRecording(pipeline, source, transport), DummyLosses())
