"""Parameters: what they carry besides numbers, names that hold on every rank, and copies that train alike."""

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import unwrap_model

from megatron_pp_ext.megatron.core.chunk_pipelines import numbers_of_layers
from megatron_pp_ext.runtime.split import has_hooks


class Marks(NamedTuple):
    """Whether a parameter is trained, and its attributes by name.

    Megatron and scripts write on a parameter whether it is trained, how it is cut, which ranks hold copies of
    it and what the optimizer does with it.  A parameter that takes its place has to carry all of that,
    whether this package knows it or not.
    """

    requires_grad: bool
    attributes: dict[str, Any]


def marks_of(parameter: torch.nn.Parameter) -> Marks:
    """Return the attributes of ``parameter``; ValueError for one that cannot be sent to another process."""
    if has_hooks(parameter):
        raise ValueError("has a gradient hook")
    for name, value in vars(parameter).items():
        try:
            pickle.dumps(value)
        except Exception as error:  # pickle raises what it likes
            raise ValueError(f"has an attribute {name!r} that cannot be sent ({error})") from error
    return Marks(parameter.requires_grad, dict(vars(parameter)))


def has_second_use(weight: torch.nn.Parameter) -> bool:
    """Return whether ``weight`` may be the embedding's or the output layer's, which can be one weight.

    The gradient of an embedding comes in I, and sums of floating-point numbers depend on their order.
    """
    marks = ("shared_embedding", "is_embedding_or_output_parameter")
    return any(getattr(weight, mark, False) for mark in marks)


def marked(data: torch.Tensor, marks: Marks) -> torch.nn.Parameter:
    """Return a parameter of these numbers that carries ``marks``."""
    parameter = torch.nn.Parameter(data, requires_grad=marks.requires_grad)
    for name, value in marks.attributes.items():
        setattr(parameter, name, value)
    return parameter


def half_frozen(name: str, state: str) -> str:
    """Return the error about copies or parts of the weight ``name`` of which some are frozen."""
    return (
        f"{name} is {state}, and these are copies or parts of one weight; freeze all of them, under tied "
        "embeddings also that of the output layer, or none"
    )


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


def require_alike(model: Sequence[torch.nn.Module]) -> None:
    """Raise ValueError, on all ranks, unless the job's copies and parts of each weight agree; collective.

    With tied embeddings the embedding and the output head have a copy each, and those that predict several
    tokens have more; a feature may give every rank a part.  Where some of them are frozen, stock waits for
    ever for gradients.
    """
    local = {
        (EMBEDDING if name == OUTPUT and has_tied_output(chunk) else name, parameter.requires_grad)
        for chunk in unwrap_model(list(model))
        for name, parameter in chunk.named_parameters()
        if name in (EMBEDDING, OUTPUT)
    }
    gathered: list[set[tuple[str, bool]]] = [local] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    for name in (EMBEDDING, OUTPUT):
        frozen, trained = (
            [rank for rank, weights in enumerate(gathered) if (name, is_trained) in weights]
            for is_trained in (False, True)
        )
        if frozen and trained:
            raise ValueError(half_frozen(name, f"frozen on rank {frozen[0]}, trained on rank {trained[0]}"))
