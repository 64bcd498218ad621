"""Steps under Megatron's own schedules, traced and measured as requested."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.registry import Registry, not_loaded
from megatron_pp_ext.integration.runners.tracing import recording

type Measure = Callable[[dist.ProcessGroup, list[torch.nn.Module], bool], AbstractContextManager[None]]
"""(pipeline group, chunks, whether it is an evaluation) -> a context around a step that measures it."""

_registry = Registry[Measure]()

register = _registry.register


def _measure(pipeline: requested.Pipeline) -> Measure:
    measure = _registry.find(pipeline)
    if measure is None and pipeline.profile is not None:
        raise not_loaded("--profile-pipeline")
    return measure or (lambda group, chunks, forward_only: nullcontext())


def measured(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a stock forward-backward function so that its steps are traced and measured as requested."""

    @functools.wraps(stock)
    def step(*, model: Any, forward_only: bool = False, **kwargs: Any) -> Any:
        group = parallel_state.get_pipeline_model_parallel_group()
        chunks = model if isinstance(model, list) else [model]
        measure = _measure(requested.require())
        with recording(group, chunks, forward_only), measure(group, chunks, forward_only):
            return stock(model=model, forward_only=forward_only, **kwargs)

    return step
