"""Megatron's own backward of one microbatch through one chunk, in every release."""

import inspect
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules as stock_schedules

_WANTED = inspect.signature(stock_schedules.backward_step).parameters
# Before 0.17 the function takes the type of the model, and does nothing with it.
_UNUSED = {"model_type": None} if "model_type" in _WANTED else {}


def backward_of_stock(
    activation: torch.Tensor | None, output: torch.Tensor, gradient: torch.Tensor | None, config: Any
) -> Any:
    """Run the backward of ``output``; return the gradient of ``activation``, the input, if it has one."""
    return stock_schedules.backward_step(activation, output, gradient, config=config, **_UNUSED)
