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


def by_placement(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``stock`` answer for the chunk that its ``vp_stage`` names, wherever it is called.

    A ``pp_rank`` that is given is a true rank, unless a mirrored group or ``parallel_state`` has told it:
    these are mirrored already, and say so.

    Seams: ``get_num_layers_to_build``, ``get_transformer_layer_offset``, ``get_gpt_decoder_block_spec`` and
    ``get_gpt_mtp_block_spec``, which have a config, and ``is_pipeline_first_stage`` and
    ``is_pipeline_last_stage``, which answer for the whole rank if ``ignore_virtual``.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def placed(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        vp_stage = given["vp_stage"]
        pipeline = chunk_pipelines.of_config(given.get("config"))
        if pipeline is None or vp_stage is None or given.get("ignore_virtual"):
            return stock(*args, **kwargs)
        if given.get("pp_rank") is not None and pipeline.is_mirrored(vp_stage):
            size = parallel_state.get_pipeline_model_parallel_world_size()
            given["pp_rank"] = mirror(given["pp_rank"], size)
        with as_chunk(vp_stage, pipeline):
            return stock(*call.args, **call.kwargs)

    return placed
