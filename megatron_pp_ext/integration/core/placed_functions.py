"""Megatron's functions about a rank's layers, answered by the placement of the chunk that is asked about.

While a mirrored chunk is at work ``parallel_state`` reports the mirrored rank, and these functions follow it.
Whoever asks at another time, to export weights or to look for the loss, gets the same answer by these hooks.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from megatron_pp_ext.integration.core import chunk_pipelines
from megatron_pp_ext.integration.core.mirrored_chunks import as_chunk, mirror
from megatron_pp_ext.integration.patching import substitute

_LAYERS, _ENDS = "config vp_stage pp_rank", "ignore_virtual vp_stage"
_DECODER = "config use_transformer_engine normalization qk_l2_norm vp_stage pp_rank"
_MTP = "config spec use_transformer_engine vp_stage pp_rank"
_WHY = "layers, embedding and head of a chunk, for whoever asks while it is not at work"


@substitute("megatron.core.transformer.transformer_block:get_num_layers_to_build", _LAYERS, _WHY)
@substitute("megatron.core.transformer.transformer_layer:get_transformer_layer_offset", _LAYERS, _WHY)
@substitute("megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec", _DECODER, _WHY)
@substitute("megatron.core.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec", _MTP, _WHY)
@substitute("megatron.core.parallel_state:is_pipeline_first_stage", _ENDS, _WHY)
@substitute("megatron.core.parallel_state:is_pipeline_last_stage", _ENDS, _WHY)
def by_placement(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``stock`` answer for the chunk that its ``vp_stage`` names, wherever it is called.

    A ``pp_rank`` in the call is a true rank, unless it comes from a mirrored group or ``parallel_state``,
    which are mirrored already and marked so.  With ``ignore_virtual`` the answer is for the whole rank.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def placed(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        vp_stage = arguments["vp_stage"]
        pipeline = chunk_pipelines.of_config(arguments.get("config"))
        if pipeline is None or vp_stage is None or arguments.get("ignore_virtual"):
            return stock(*args, **kwargs)
        if arguments.get("pp_rank") is not None and pipeline.is_mirrored(vp_stage):
            size = parallel_state.get_pipeline_model_parallel_world_size()
            arguments["pp_rank"] = mirror(arguments["pp_rank"], size)
        with as_chunk(vp_stage, pipeline):
            return stock(*call.args, **call.kwargs)

    return placed
