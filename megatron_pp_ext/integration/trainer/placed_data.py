"""Data for the stages that a V puts on a rank."""

import functools
from collections.abc import Callable
from typing import Any

from megatron_pp_ext.integration.core.mirrored_chunks import as_chunk
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
    keywords = getattr(provider, "keywords", {})

    @functools.wraps(provider, assigned=())
    def placed(*args: Any, **kwargs: Any) -> Any:
        with as_chunk(keywords.get("vp_stage")):
            return provider(*args, **kwargs)

    return stock(placed)
