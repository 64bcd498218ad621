"""Initial weights that do not depend on where layers live: --pipeline-layer-seeds.

Megatron seeds a rank by its place in the pipeline and draws the weights of its layers one after the other, so
every placement starts from other weights.  Here each part of the model (a layer, the embedding, and the
rest, which is the output layer) is drawn from a seed of its own, made from --seed and the part's place in the
model.  Megatron's own function does the seeding, so tensor-parallel and expert-parallel ranks differ, or
agree, as in stock.  Afterwards all generators are where they were.
"""

import functools
import hashlib
import inspect
import random
from argparse import Namespace
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

FLAG = "--pipeline-layer-seeds"

_MODEL = "model"

_seed_for: Callable[[str], None] | None = None
"""Seeds all generators for a part of the model; None without the flag."""

_drawing: str | None = None
"""The part that is being built; ``_MODEL`` between the parts of a model, None outside of one."""


def remember_seeding(stock: Callable[..., None]) -> Callable[..., None]:
    """Keep the way in which Megatron seeds this rank, to seed it again for each part of the model.

    Seam: ``_set_random_seed`` in ``megatron.training.initialize``, which adds 100 to the seed for each
    pipeline rank.
    """
    parameters = inspect.signature(stock)

    @functools.wraps(stock)
    def set_random_seed(*args: Any, **kwargs: Any) -> None:
        global _seed_for
        stock(*args, **kwargs)
        _seed_for = None
        given = get_args()
        if not getattr(given, "pipeline_layer_seeds", False):
            return
        _refuse(given)
        call = parameters.bind(*args, **kwargs)
        group, seed = call.arguments.get("pp_group"), call.arguments["seed_"]

        def seed_for(part: str) -> None:
            # Read now: under a V it is another while a chunk is built.
            in_pipeline = parallel_state.get_pipeline_model_parallel_rank
            rank = in_pipeline() if group is None else get_pg_rank(group)
            call.arguments["seed_"] = seed_of(seed, part) - 100 * rank
            stock(*call.args, **call.kwargs)

        _seed_for = seed_for

    return set_random_seed


def seed_of(seed: int, part: str) -> int:
    """Return the seed of a part of the model: far from 0, and within what every generator takes."""
    return 2**24 + int.from_bytes(hashlib.sha256(f"{seed} {part}".encode()).digest()[:4]) % 2**30


def draw_model(stock: Callable[..., None]) -> Callable[..., None]:
    """Draw what no other hook here draws, the output layer, from a seed of its own.

    Seams: ``__init__`` of ``GPTModel``, ``HybridModel`` and, before 0.18, ``MambaModel``.
    """

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with _drawn_for(_MODEL):
            stock(self, *args, **kwargs)

    return init


def draw_embedding(stock: Callable[..., None]) -> Callable[..., None]:
    """Draw the embedding from a seed of its own.

    Seam: ``LanguageModelEmbedding.__init__`` in ``megatron.core.models.common.embeddings``.
    """

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with _drawn_for("embedding"):
            stock(self, *args, **kwargs)

    return init


def draw_layer(stock: Callable[..., None]) -> Callable[..., None]:
    """Draw a layer from the seed of its number in the model.

    Seams: ``__init__`` of ``TransformerLayer``, and of ``MambaLayer``, which is given that number.
    """
    parameters = inspect.signature(stock)

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = _arguments(parameters, self, *args, **kwargs)
        number = given["layer_number"]
        if given.get("add_layer_offset") and not given["is_mtp_layer"]:
            groups = given["pg_collection"]
            rank = None if groups is None else get_pg_rank(groups.pp)
            number += get_transformer_layer_offset(given["config"], given["vp_stage"], rank)
        with _drawn_for(f"layer {number}"):
            stock(self, *args, **kwargs)

    return init


def draw_prediction(stock: Callable[..., None]) -> Callable[..., None]:
    """Draw a layer of multi-token prediction, with the transformer layers in it, from a seed of its own.

    Seam: ``MultiTokenPredictionLayer.__init__`` in ``megatron.core.transformer.multi_token_prediction``.
    """
    parameters = inspect.signature(stock)

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = _arguments(parameters, self, *args, **kwargs)
        number = given["layer_number"] + get_mtp_layer_offset(given["config"], given["vp_stage"])
        with _drawn_for(f"prediction {number}"):
            stock(self, *args, **kwargs)

    return init


def _arguments(parameters: inspect.Signature, *args: Any, **kwargs: Any) -> dict[str, Any]:
    call = parameters.bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


@contextmanager
def _drawn_for(part: str) -> Iterator[None]:
    """Let the generators be those of ``part``, unless a part that contains it is being built."""
    global _drawing
    if _seed_for is None or _drawing not in (None, _MODEL):
        yield
        return
    if _drawing is None and part != _MODEL:
        raise SystemExit(
            f"megatron_pp_ext: {FLAG} knows the parts of GPTModel and HybridModel, and this script builds "
            "another model; leave it out, and start from a checkpoint instead"
        )
    before, _drawing = _drawing, part
    try:
        with _generators_kept():
            _seed_for(part)
            yield
    finally:
        _drawing = before


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


def _refuse(args: Namespace) -> None:
    """End the process with one line where weights are not drawn while the model is built."""
    if getattr(args, "init_model_with_meta_device", False):
        raise SystemExit(
            f"megatron_pp_ext: {FLAG} cannot go with --init-model-with-meta-device, under which weights are "
            "drawn after the model is built; leave one of them out"
        )
