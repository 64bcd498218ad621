"""Updates of a stage's weights that do not wait for the other stages.

Stock takes the gradient norm, for clipping and for the log, over all pipeline ranks, and has them agree that
the update was done.  Under a schedule that never flushes, each stage takes its own.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pp_ext.around import bound
from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.patching import hook


def updates_by_stage() -> bool:
    """Return whether stages update their weights without waiting for each other."""
    pipeline = requested.pipeline()
    return pipeline is not None and pipeline.updates is not None and not pipeline.updates.waits


_CLIP = "megatron.core.optimizer.clip_grads"
_ZEROS = "parameters grad_stats_parallel_group use_decoupled_grad tp_group"


@hook(
    f"{_CLIP}:get_grad_norm_fp32",
    "grads_for_norm norm_type grad_stats_parallel_group",
    "gradient norms of a pipeline that never flushes",
)
@hook(
    f"{_CLIP}:count_zeros_fp32",
    (_ZEROS, f"{_ZEROS} expert_tp_group"),
    "counts of zeros in a pipeline that never flushes",
)
def sum_within_stage(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Sum a statistic of the gradients over this stage's ranks alone, also where stock names no group.

    The distributed optimizer of Muon and its like (``LayerWiseDistributedOptimizer``) sums over all ranks.
    """
    if not updates_by_stage():
        return stock(*args, **kwargs)
    call = bound(stock, *args, **kwargs)
    group = call.arguments.get("grad_stats_parallel_group")
    call.arguments["grad_stats_parallel_group"] = _part_of_stage(group)
    return stock(*call.args, **call.kwargs)


def _part_of_stage(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group of the ranks of ``group``, None for all, that are in this rank's pipeline stage."""
    stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    ranks = _ranks(group) & _ranks(stage)
    for candidate in (
        stage,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_tensor_and_model_parallel_group(),
        parallel_state.get_tensor_and_context_parallel_group(),
    ):
        if _ranks(candidate) == ranks:
            return candidate
    raise RuntimeError(
        f"Megatron has no process group of the ranks {sorted(ranks)}, over which this stage would take its "
        "gradient norm; add --pipeline-allow-waits, which takes it over all stages"
    )


def _ranks(group: dist.ProcessGroup | None) -> set[int]:
    return set(dist.get_process_group_ranks(group))
