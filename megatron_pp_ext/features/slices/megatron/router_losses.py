"""The losses of experts' routers in the log: means over a microbatch's slices, each of which has its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state


def _logged() -> dict[str, torch.Tensor]:
    """Return the sums of layers, by the names of the losses, that Megatron prints after a step."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # an older release
        tracker = parallel_state.get_moe_layer_wise_logging_tracker()
        return {name: entry["values"] for name, entry in tracker.items()}
    return {name: entry.values for name, entry in get_moe_metrics_tracker()._metrics.items()}


@contextmanager
def averaged(count: float) -> Iterator[None]:
    """Divide what microbatches add by the ``count`` of units that one has: Megatron expects one."""
    before = {name: values.clone() for name, values in _logged().items()}
    try:
        yield
    finally:
        for name, values in _logged().items():
            earlier = before.get(name, torch.zeros_like(values))
            values.copy_(earlier + (values - earlier) / count)
