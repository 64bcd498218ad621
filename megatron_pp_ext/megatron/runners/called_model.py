"""A model under a schedule that a call requested, and what it decides of the pipeline before its first step.

A call of ``install`` knows no model.  Before the first step there is one: its config and that of its data
parallelism are held against the rules for flags, costs follow from its sizes where none were given, and
features read what the config asks of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_model_config, get_te_version

from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.costs.stages import cost_model, stage_costs
from megatron_pp_ext.job import options
from megatron_pp_ext.job.model_config import arguments
from megatron_pp_ext.job.pipeline import require_trainable
from megatron_pp_ext.job.requested_job import CORE, ENGINE, RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.megatron.core.chunk_pipelines import part_of
from megatron_pp_ext.megatron.core.optimizer import turn_off
from megatron_pp_ext.megatron.releases import megatron_version
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.placement import Placement


def bind_to_model(
    pipeline: Pipeline, model: Sequence[torch.nn.Module], sequence: int, microbatch: int
) -> Pipeline:
    """Return ``pipeline`` as the chunks ``model`` need it; ValueError where it cannot train them.

    A step has ``microbatch`` samples of ``sequence`` tokens in a microbatch.
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
        {ENGINE: str(get_te_version()), CORE: megatron_version()},
        placement=pipeline.placement,
        chunks=pipeline.placement.chunks,
        from_file=request.from_file,
    )
    job = job.with_arguments(**options.chosen(job, lambda _: request, lambda: job.padded_vocabulary))
    request = options.read(job, request)
    job = replace(job, splits=request.may_split_backward)
    all_rules.refuse_model(job)
    turn_off(pipeline, *map(get_model_config, model))
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
