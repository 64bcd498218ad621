"""The part of a microbatch that a slice of its sequences needs."""

from typing import Any

import torch

_ALONG_LAST = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")
"""The arguments of Megatron's models that have a number for each token, with the tokens last."""


def cut(arguments: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """Return the ``arguments`` of a model's forward for the tokens from ``start`` to ``end``.

    A mask of attention keeps the columns of all tokens before.  ValueError for a tensor or a description of
    documents of which it is not known how to cut it.
    """
    return {name: _cut(name, value, start, end) for name, value in arguments.items()}


def _cut(name: str, value: Any, start: int, end: int) -> Any:
    if name in _ALONG_LAST and isinstance(value, torch.Tensor):
        return value[..., start:end]
    if name == "attention_mask" and isinstance(value, torch.Tensor):
        return value[..., start:end, :end]
    if name == "decoder_input" and isinstance(value, torch.Tensor):
        return value[start:end]
    if isinstance(value, torch.Tensor) or (name == "packed_seq_params" and value is not None):
        raise ValueError(
            f"slices of sequences do not know how to cut {name}, which the forward step gives to the model; "
            "leave it out, or leave out --pipeline-slice-tokens"
        )
    return value
