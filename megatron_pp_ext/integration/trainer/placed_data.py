"""Data for the stages that a V puts on a rank."""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.core.mirrored_chunks import as_chunk, as_stock
from megatron_pp_ext.integration.patching import hook


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
