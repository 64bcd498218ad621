"""Names of parameters that do not depend on where their layers live."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.utils import unwrap_model

from megatron_pp_ext.integration.core.built_layers import numbers_of_layers

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""The names of the two weights that are copies of each other under tied embeddings."""


def global_parameters(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    """Name the parameters of this rank as a model on one rank would, layers counted from 1.

    A tied output weight goes by the name of the embedding that it copies, so a name can come twice.
    """
    pairs = []
    for chunk in unwrap_model(list(chunks)):
        layers = numbers_of_layers(chunk)
        for name, parameter in chunk.named_parameters():
            layer = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
            if layer is not None:
                name = f"decoder.layers.{layers[layer]}{name[len(layer) :]}"
            elif name == OUTPUT and has_tied_output(chunk):
                name = EMBEDDING
            pairs.append((_global_expert(name, chunk.config.num_moe_experts), parameter))
    return pairs


def _global_expert(name: str, experts: int | None) -> str:
    """Count experts from the first expert-parallel rank on."""
    before, dot, expert = name.partition(".local_experts.")
    if not dot or experts is None:
        return name
    index, _, after = expert.partition(".")
    local_experts = experts // mpu.get_expert_model_parallel_world_size()
    return f"{before}{dot}{mpu.get_expert_model_parallel_rank() * local_experts + int(index)}.{after}"


def has_tied_output(chunk: torch.nn.Module) -> bool:
    """Whether the output weight is a copy of the embedding's; MTP brings its own copy.

    What a feature puts in the place of the output layer knows it itself (``is_tied``).
    """
    layer: Any = chunk.output_layer
    if (is_tied := getattr(layer, "is_tied", None)) is not None:
        return bool(is_tied)
    shares = getattr(chunk, "share_embeddings_and_output_weights", False)
    return bool(shares and not getattr(chunk, "mtp_process", False))
