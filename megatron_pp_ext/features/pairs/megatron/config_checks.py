"""Megatron's checks of the configs of models that run in pairs."""

from collections.abc import Callable, Iterator
from typing import Any

from megatron_pp_ext.around import around
from megatron_pp_ext.integration import requested

_WHOLE_LAYERS = ("recompute_granularity", "recompute_method", "recompute_num_layers")


@around
def check_as_planned(stock: Callable[[Any], None], self: Any) -> None:
    """Let a model's config pass Megatron's checks of pairs where only Megatron's own schedule needs them.

    Megatron refuses --overlap-moe-expert-parallel-comm without virtual stages, since its own 1F1B has no
    pairs.  The plans of layers, which pairs are run by, do not care how many chunks a rank has.  It refuses
    full recomputation, which ``recomputed_segments`` adds to the plans.  Every other check of pairs stays.
    Nothing changes where Megatron's own schedule runs.
    """
    pipeline = requested.pipeline()
    if pipeline is None or pipeline.source is None or not self.overlap_moe_expert_parallel_comm:
        stock(self)
        return
    replaced = dict(_replaced(self, pipeline.placement.chunks))
    values = {name: getattr(self, name) for name in replaced}
    try:
        for name, value in replaced.items():
            setattr(self, name, value)
        stock(self)
    finally:
        for name, value in values.items():
            setattr(self, name, value)


def _replaced(config: Any, chunks: int) -> Iterator[tuple[str, Any]]:
    """Yield the settings that Megatron's checks of pairs see with another value, with that value."""
    if chunks == 1:
        yield "virtual_pipeline_model_parallel_size", 1
    if config.recompute_granularity == "full":
        yield from ((name, None) for name in _WHOLE_LAYERS)
