"""Models of megatron.core, built for the placement of the pipeline that is in force, whoever builds them.

Megatron's own trainer builds all chunks of a rank in one function (``mirrored_chunks.build_chunks_placed``).
Other trainers have builders of their own, and all of them make each chunk by the model's class.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_pp_ext.around import bound
from megatron_pp_ext.integration import patching, requested
from megatron_pp_ext.integration.core import built_chunks, chunk_pipelines
from megatron_pp_ext.integration.core.embedding_copies import tie_embeddings
from megatron_pp_ext.integration.core.mirrored_chunks import build_chunk_placed
from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.job.call_words import in_words_of_call

_unfinished: list[torch.nn.Module] = []
"""The chunks of the model that is being built."""


_GPT = (
    "self config transformer_layer_spec vocab_size max_sequence_length pre_process post_process "
    "fp16_lm_cross_entropy parallel_output share_embeddings_and_output_weights position_embedding_type "
    "rotary_percent rotary_base rope_scaling rope_scaling_factor scatter_embedding_sequence_parallel "
    "seq_len_interpolation_factor mtp_block_spec pg_collection vp_stage"
)
_RATIOS = (
    "vocab_size max_sequence_length hybrid_attention_ratio hybrid_mlp_ratio hybrid_override_pattern "
    "pre_process post_process fp16_lm_cross_entropy parallel_output share_embeddings_and_output_weights "
    "position_embedding_type rotary_percent rotary_base scatter_embedding_sequence_parallel "
    "seq_len_interpolation_factor pg_collection"
)
_HYBRID = f"self config hybrid_stack_spec {_RATIOS} hybrid_layer_pattern vp_stage"
_MAMBA = f"self config mamba_stack_spec {_RATIOS}"


_WHY = "chunks of a V or wave from the other end, whoever builds them"


@hook(
    "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
    (_GPT, f"{_GPT} logit_dtype"),
    _WHY,
)
@hook(
    "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
    (_HYBRID, f"{_HYBRID} logit_dtype"),
    _WHY,
    # Newer ones make a MambaModel of a HybridModel.
    before={
        "megatron.core.models.mamba.mamba_model:MambaModel.__init__": (
            _MAMBA,
            f"{_MAMBA} vp_stage",
            f"{_MAMBA} hybrid_layer_pattern vp_stage",
        )
    },
)
def build_placed(stock: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """Build a chunk of a model for its placement.

    ValueError where the process groups or the config are made for another number of ranks or chunks than the
    schedule's.
    """
    pipeline = requested.pipeline()
    if pipeline is None or not pipeline.is_per_model:
        if pipeline is None:
            chunk_pipelines.claim(bound(stock, model, *args, **kwargs).arguments["config"], None)
            chunk_pipelines.remember(model, None)
        stock(model, *args, **kwargs)
        return
    call = bound(stock, model, *args, **kwargs)
    given = call.arguments
    groups = copy.copy(given.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups())
    chunk = given.get("vp_stage")
    require_sizes(pipeline, groups.pp.size(), given["config"], chunk)
    chunk_pipelines.claim(given["config"], pipeline)
    if pipeline.has_embedding_with_head:
        # Both copies of a tied weight are on one rank (``sum_tied_gradients``): there is nobody to exchange
        # it with, whichever ranks Megatron's group has, which may be older than the schedule.
        groups.embd = None

    def build(**placed: Any) -> Any:
        given.update(placed)
        stock(*call.args, **call.kwargs)
        return model

    if chunk is None:
        build(pg_collection=groups)
    else:
        build_chunk_placed(build, groups, vp_stage=chunk)
    chunk_pipelines.remember(model, pipeline)
    _collect(model, chunk or 0, pipeline)


@in_words_of_call()
def _collect(model: torch.nn.Module, chunk: int, pipeline: Pipeline) -> None:
    """Do after the last chunk of a rank what needs all of them; they are built in order."""
    if chunk == 0:
        _unfinished.clear()
    _unfinished.append(model)
    if len(_unfinished) < pipeline.placement.chunks:
        return
    chunks = tuple(_unfinished)
    _unfinished.clear()
    built_chunks.finish(chunks)
    tie_embeddings(chunks)
    patching.apply_imported()  # before any weights are imported into the chunks


def require_sizes(pipeline: Pipeline, ranks: int, config: Any, chunk: int | None) -> None:
    """Raise ValueError unless a model of ``config`` in ``ranks`` pipeline ranks fits the placement."""
    placement = pipeline.placement
    if ranks != placement.ranks:
        raise ValueError(
            f"{pipeline.name} was installed for {placement.ranks} pipeline ranks, and this model's pipeline "
            f"has {ranks}; give megatron_pp_ext.install ranks={ranks}"
        )
    if pipeline.moves_stages and not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            f"{pipeline.name} needs Megatron's global process groups (parallel_state), and this model has "
            "groups of its own alone; leave use_decentralized_pg out, or choose a schedule with one chunk a "
            "rank, such as 1f1b or zb-h1"
        )
    built = config.virtual_pipeline_model_parallel_size or 1
    if built != placement.chunks:
        wanted = placement.chunks if placement.chunks > 1 else None
        raise ValueError(
            f"{pipeline.name} has {placement.chunks} chunks a rank, and this model's config says {built}; "
            f"set virtual_pipeline_model_parallel_size to {wanted}{_or_one_chunk(built)}"
        )
    if chunk is None and placement.chunks > 1:
        raise ValueError(
            f"{pipeline.name} has {placement.chunks} chunks a rank, and whoever builds this model does not "
            f"say which one it is; give it vp_stage{_or_one_chunk(1)}"
        )


def _or_one_chunk(chunks: int) -> str:
    return ", or choose a schedule with one chunk a rank, such as 1f1b or zb-h1" if chunks == 1 else ""
