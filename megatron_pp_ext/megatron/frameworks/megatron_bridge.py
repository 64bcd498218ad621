"""Megatron-Bridge: parts around a language model, and tied weights that it imports."""

from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core import chunk_pipelines
from megatron_pp_ext.megatron.core.embedding_copies import tie_embeddings
from megatron_pp_ext.megatron.core.placed_models import is_mirrored, placed_groups
from megatron_pp_ext.megatron.patching import hook


@hook(
    "megatron.bridge.training.utils.pg_utils:get_pg_collection",
    "model",
    "a batch's labels and images for the first and the last stage",
)
def groups_placed(stock: Callable[..., Any], model: Any) -> Any:
    """Return the groups of ``model``, by which a forward step asks whether its chunk is an end of it."""
    groups = stock(model)
    return placed_groups(groups) if is_mirrored() else groups


class _Placed:
    """A provider of chunks that has each of them built as the stage that it is in the placement."""

    def __init__(self, provider: Any, pipeline: requested.Pipeline) -> None:
        self._provider, self._placement = provider, pipeline.placement

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    def provide(self, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
        """Return a chunk; a provider builds the parts around a language model by these arguments too."""
        rank = parallel_state.get_pipeline_model_parallel_group().rank()
        stage = self._placement.stage_of(rank, vp_stage or 0)
        stage_flags = {"pre_process": stage == 0, "post_process": stage == self._placement.stages - 1}
        return self._provider.provide(**stage_flags, vp_stage=vp_stage)


@hook(
    "megatron.bridge.models.model_provider:_create_model",
    "model_provider model_type pg_collection",
    "an image encoder, for example, on the rank that has the embedding",
)
def provide_placed(stock: Callable[..., Any], model_provider: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a provider build the parts around a language model on the first and the last stage.

    Stock goes by the number of the rank.
    """
    pipeline = requested.pipeline()
    if pipeline is not None and pipeline.is_per_model and pipeline.placement.has_mirrored:
        model_provider = _Placed(model_provider, pipeline)
    return stock(model_provider, *args, **kwargs)


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
    if pipeline is not None and pipeline.has_embedding_with_head:
        with requested.using(pipeline):
            tie_embeddings(chunks)
    else:
        stock(bridge, megatron_model)
