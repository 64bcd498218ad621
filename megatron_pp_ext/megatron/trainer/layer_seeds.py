"""Initial weights that do not depend on where layers live: --pipeline-layer-seeds.

Megatron seeds a rank by its place in the pipeline and draws the weights of its layers one after the other, so
every placement starts from other weights.  Here each part of the model is drawn from a seed of its own, made
from --seed and the part's place in the model: the embedding, which a chunk begins with, each layer, and the
rest, which is the output layer.  Megatron's own function does the seeding, so tensor-parallel and
expert-parallel ranks differ, or agree, as in stock.  After a chunk all generators are where they were.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.multi_token_prediction import get_mtp_layer_offset
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_pg_rank
from megatron.training import get_args

from megatron_pp_ext.around import around, bound
from megatron_pp_ext.megatron.core.placed_models import build_chunks_placed
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.releases import CORE_0_18

FLAG = "--pipeline-layer-seeds"

_REST = "model"
_KNOWN = {"GPTModel", "HybridModel", "MambaModel"}

_seed_for: Callable[[str], None] | None = None
"""Seeds all generators for a part of the model; None without the flag."""

_drawn: list[str] | None = None
"""The layers of the chunk that is being built; None outside of a chunk, and within a layer with its parts."""


_SEED = "seed_ data_parallel_random_init te_rng_tracker inference_rng_tracker use_cudagraphable_rng"
_GROUPS = f"{_SEED} pp_group dp_group tp_group ep_group etp_group"
_WHY = "initial weights that do not depend on the placement"


@hook(
    "megatron.training.initialize:_set_random_seed",
    (_SEED, _GROUPS, f"{_GROUPS} gtp_remat_group egtp_remat_group"),
    _WHY,
)
def remember_seeding(stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Keep the way in which Megatron seeds this rank, to seed it again for each part of the model.

    Stock adds 100 to the seed for each pipeline rank.
    """
    global _seed_for
    stock(*args, **kwargs)
    _seed_for = None
    flags = get_args()
    if not getattr(flags, "pipeline_layer_seeds", False):
        return
    call = bound(stock, *args, **kwargs)
    group, seed = call.arguments.get("pp_group"), call.arguments["seed_"]

    def seed_for(part: str) -> None:
        # Read now: under a V it is another while a chunk is built.
        in_pipeline = parallel_state.get_pipeline_model_parallel_rank
        rank = in_pipeline() if group is None else get_pg_rank(group)
        call.arguments["seed_"] = seed_of(seed, part) - 100 * rank
        stock(*call.args, **call.kwargs)

    _seed_for = seed_for


def seed_of(seed: int, part: str) -> int:
    """Return the seed of a part of the model: far from 0, and in the range of every generator."""
    return 2**24 + int.from_bytes(hashlib.sha256(f"{seed} {part}".encode()).digest()[:4]) % 2**30


@hook(
    "megatron.training.training:get_model",
    "model_provider_func model_type wrap_with_ddp config pg_collection",
    "chunks of a V or wave from the other end, made by a model provider",
)
@hook(
    "megatron.training.models.dist_utils:build_virtual_pipeline_stages",
    "build_model_func pg_collection vp_size model_type",
    "chunks of a V or wave from the other end, made from a model config",
    since=CORE_0_18,
)
def draw_chunks(stock: Callable[..., Any], build_chunk: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build the chunks where they are placed, each drawn from the seeds of its parts."""
    build = build_chunk if _seed_for is None else _seeded(build_chunk)
    return build_chunks_placed(stock)(build, *args, **kwargs)


@around
def _seeded(build_chunk: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _drawn
    layers: list[str] = []
    _drawn = layers
    try:
        with _generators_kept():
            _seed("embedding" if kwargs.get("pre_process", True) else _REST)
            chunk = build_chunk(*args, **kwargs)
    finally:
        _drawn = None
    is_known = _KNOWN & {kind.__name__ for kind in type(chunk).__mro__}
    if not is_known or len(layers) < len(chunk.decoder.layers):
        raise SystemExit(
            f"megatron_pp_ext: {FLAG} knows the parts of GPTModel and HybridModel, and this script "
            "builds another model; leave it out, and start from a checkpoint instead"
        )
    return chunk


@hook("megatron.core.transformer.spec_utils:build_module", "spec_or_module args kwargs", _WHY)
def draw_layer(stock: Callable[..., Any], spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw a layer, with all that is in it, from the seed of its number in the model."""
    global _drawn
    if _drawn is None or "layer_number" not in kwargs:
        return stock(spec_or_module, *args, **kwargs)
    layers, _drawn = _drawn, None
    layer = _layer(**kwargs)
    _seed(layer)
    module = stock(spec_or_module, *args, **kwargs)
    _seed(_REST)
    layers.append(layer)
    _drawn = layers
    return module


def _layer(layer_number: int, config: Any, vp_stage: int | None = None, **more: Any) -> str:
    """Return the name of a layer, whose number counts from the rank's first or from the model's."""
    if "mtp_layer_pattern" in more:
        return f"prediction {layer_number + get_mtp_layer_offset(config, vp_stage)}"
    if not {"add_layer_offset", "pp_layer_offset"} & more.keys():  # Hybrid models give the model's number.
        groups = more.get("pg_collection")
        rank = None if groups is None else get_pg_rank(groups.pp)
        layer_number += get_transformer_layer_offset(config, vp_stage, rank)
    return f"layer {layer_number}"


def _seed(part: str) -> None:
    if _seed_for is not None:
        _seed_for(part)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Put all generators back to where they are when the context is entered."""
    tracker = get_cuda_rng_tracker()
    # Seeding replaces the tracker's states, and so leaves these as they are.
    states, seeds = tracker.get_states(), set(tracker.seeds_)
    python, numpy = random.getstate(), np.random.get_state()
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    try:
        yield
    finally:
        tracker.set_states(states)
        tracker.seeds_ = seeds
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        torch.cuda.set_rng_state(device)
