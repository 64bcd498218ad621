"""The losses of experts' routers, of which each slice has its own: their scale, and their means in logs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


def _logged() -> dict[str, torch.Tensor]:
    """Return the sums of layers, by the names of the losses, that Megatron prints after a step."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # an older release
        tracker = parallel_state.get_moe_layer_wise_logging_tracker()
        return {name: entry["values"] for name, entry in tracker.items()}
    return {name: entry.values for name, entry in get_moe_metrics_tracker()._metrics.items()}


@contextmanager
def of_part(share: float, config: Any = None) -> Iterator[None]:
    """Let the routers' losses of a slice count by its ``share`` of the tokens of its microbatch.

    Megatron takes them for those of a microbatch: it adds them to a log, here and where layers are
    recomputed, and multiplies their gradients by a scale, the same in all backwards, that it sets in every
    forward.  With the ``config`` of a model the context surrounds a backward.  Where losses are counted by
    tokens, gradients have the weight of their tokens already.
    """
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    if config is None or config.calculate_per_token_loss:
        scale = None
    before = {name: values.clone() for name, values in _logged().items()}
    if scale is not None:
        scale = scale.clone()  # Megatron writes the next one into it
        MoEAuxLossAutoScaler.set_loss_scale(scale * share)
    try:
        yield
    finally:
        if scale is not None:
            MoEAuxLossAutoScaler.set_loss_scale(scale)
        for name, values in _logged().items():
            earlier = before.get(name, torch.zeros_like(values))
            values.copy_(earlier + (values - earlier) * share)
