"""Which runner runs the steps of this process: Megatron's own, or one of this package's."""

import functools
from collections.abc import Callable
from typing import Any

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.runners import layer_profiler, tracing
from megatron_pp_ext.integration.runners.flush_free import FlushFreeRunner
from megatron_pp_ext.integration.runners.flushed import PipelineRunner, refuse_multimodule
from megatron_pp_ext.integration.runners.profile_guided import GuidedRunner
from megatron_pp_ext.integration.runners.rehearsing import RehearsalRunner


def choose_schedule(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Answer with the schedule in force, or with stock's own where none was asked for.

    Seam: ``get_forward_backward_func`` in ``megatron.core.pipeline_parallel.schedules``.
    """

    @functools.wraps(stock)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        pipeline = requested.pipeline()
        if pipeline is None:
            return stock(*args, **kwargs)
        if pipeline.source is None:
            return tracing.traced_step(layer_profiler.profiled_step(stock(*args, **kwargs)))
        refuse_multimodule(*args, *kwargs.values())
        return runner(pipeline)

    return get_forward_backward_func


@functools.lru_cache(maxsize=1)
def runner(pipeline: requested.Pipeline) -> PipelineRunner:
    """The one that runs all steps of ``pipeline``."""
    if pipeline.rehearsal is not None:
        return RehearsalRunner(pipeline)
    if pipeline.updates is not None:
        return FlushFreeRunner(pipeline)
    if pipeline.profile_steps is not None:
        return GuidedRunner(pipeline)
    return PipelineRunner(pipeline)
