"""Data for the stages that a V puts on a rank, and samples for stages with different numbers of replicas."""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pp_ext.around import bound
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core.placed_models import as_chunk, as_stock
from megatron_pp_ext.megatron.core.replicated_ranks import replicated
from megatron_pp_ext.megatron.patching import hook


@hook(
    "megatron.training.training:build_train_valid_test_data_iterators",
    "build_train_valid_test_datasets_provider",
    "data for the stages that a V puts on this rank",
)
def provide_data_placed(stock: Callable[..., Any], provider: Callable[..., Any]) -> Any:
    """Call the dataset provider of a mirrored chunk under the mirrored rank.

    Megatron asks once a chunk, with ``functools.partial(provider, vp_stage=chunk)``.
    """
    chunk = getattr(provider, "keywords", {}).get("vp_stage")

    @functools.wraps(provider, assigned=())
    def placed(*args: Any, **kwargs: Any) -> Any:
        with as_stock() if _is_needed_by_others(chunk) else as_chunk(chunk):
            return provider(*args, **kwargs)

    return stock(placed)


def _is_needed_by_others(chunk: int | None) -> bool:
    """Whether this rank has to build data that it does not read.

    Where a V has embedding and head on the last rank, the job's rank 0 reads none.  But it builds what all
    ranks find in the cache, and reports to them whether there is anything to train on.
    """
    pipeline = requested.pipeline()
    return pipeline is not None and pipeline.placement.ends_on_last and chunk == 0 and dist.get_rank() == 0


@hook(
    "megatron.training.datasets.data_samplers:MegatronPretrainingSampler.__init__",
    "self total_samples consumed_samples micro_batch_size data_parallel_rank data_parallel_size drop_last",
    "microbatches that the replicas of a stage take in turn",
)
def take_turns(stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Let one of a stage's r replicas read every r-th microbatch.

    Megatron gives the rank among the replicas, and 1 for their number.

    The number of samples in a step cannot go by the number of replicas, which differs by stage.  Megatron
    counts a single data-parallel rank, with all microbatches of a step, and each replica's sampler takes
    every r-th of them, which are the ones that the schedule gives it (``schedule.families.pipedream``).
    """
    call = bound(stock, *args, **kwargs)
    if replicated():
        call.arguments["data_parallel_size"] = parallel_state.get_data_parallel_group().size()
    stock(*call.args, **call.kwargs)
