"""Steps under Megatron's own schedules, traced and measured as requested."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.core import parallel_state

from megatron_pp_ext.integration import products, requested
from megatron_pp_ext.integration.runners.tracing import recording


def measured(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a stock forward-backward function so that its steps are traced and measured as requested."""

    @functools.wraps(stock)
    def step(*, model: Any, forward_only: bool = False, **kwargs: Any) -> Any:
        group = parallel_state.get_pipeline_model_parallel_group()
        chunks = model if isinstance(model, list) else [model]
        measuring: AbstractContextManager[None] = nullcontext()
        if requested.require().profile is not None:
            measuring = products.loaded().profiling(group, chunks, forward_only)
        with recording(group, chunks, forward_only), measuring:
            return stock(model=model, forward_only=forward_only, **kwargs)

    return step
