"""Megatron-Bridge: tied weights that it imports from Hugging Face."""

from collections.abc import Callable
from typing import Any

from megatron.core.utils import unwrap_model

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.core import chunk_pipelines
from megatron_pp_ext.integration.core.embedding_copies import tie_ends
from megatron_pp_ext.integration.patching import hook


@hook(
    "megatron.bridge.models.conversion.model_bridge:MegatronModelBridge._broadcast_shared_embeddings",
    "self megatron_model",
    "tied weights that Megatron-Bridge imports, whose two copies are on one rank",
)
def tie_imported(stock: Callable[..., None], bridge: Any, megatron_model: Any) -> None:
    """Copy an imported embedding to the output layer that is tied to it, where one rank has both.

    Stock sends the embedding to the last rank.  The file has no output weight: without it a V would train on
    the one that it was built with.
    """
    chunks = unwrap_model(megatron_model if isinstance(megatron_model, list) else [megatron_model])
    pipeline = chunk_pipelines.of_model(chunks)
    if pipeline is not None and pipeline.has_both_ends_on_one_rank:
        with requested.using(pipeline):
            tie_ends(chunks)
    else:
        stock(bridge, megatron_model)
