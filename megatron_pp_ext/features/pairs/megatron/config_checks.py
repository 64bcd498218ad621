"""Megatron's checks of the configs of models that run in pairs."""

from collections.abc import Callable
from typing import Any

from megatron_pp_ext.around import around
from megatron_pp_ext.integration import requested


@around
def check_as_one_virtual_stage(stock: Callable[[Any], None], self: Any) -> None:
    """Let a model's config pass its checks as if its one chunk a rank were one virtual stage.

    Megatron refuses --overlap-moe-expert-parallel-comm without virtual stages, since its own 1F1B has no
    pairs.  The plans of layers, which pairs are run by, do not care how many chunks a rank has.  Every other
    check of pairs stays.  Nothing changes where Megatron's own schedule runs.
    """
    pipeline = requested.pipeline()
    is_ours = pipeline is not None and pipeline.source is not None and pipeline.placement.chunks == 1
    if not (is_ours and self.overlap_moe_expert_parallel_comm):
        stock(self)
        return
    self.virtual_pipeline_model_parallel_size = 1
    try:
        stock(self)
    finally:
        self.virtual_pipeline_model_parallel_size = None
