"""The part of a microbatch that a slice of its sequences, or a pack of short ones, needs."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_pp_ext.features.slices.runtime.prefixes import Slice
from megatron_pp_ext.setting_error import SettingError

_ALONG_LAST = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")
"""The arguments of Megatron's models that have a number for each token, with the tokens last."""

_OTHERS = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "tokens_per_sample")
"""What some releases know of documents beside their lengths, which a pack has not."""


def cut(arguments: dict[str, Any], here: Slice) -> dict[str, Any]:
    """Return the ``arguments`` of a model's forward for the tokens of ``here``.

    A mask of attention keeps the columns of all tokens before.  Lengths of documents (``packed_seq_params``)
    become those of a pack, and are left out for a single document.  ValueError for a tensor of which it is
    not known how to cut it, and for documents other than the step was planned for.
    """
    tells = arguments.get("packed_seq_params")
    if len(here.sizes) == 1 and tells is None:
        tells = arguments.get("attention_mask")
    if tells is None and _is_of_several(here):
        raise ValueError(
            "a microbatch has several documents by its lengths, but its forward step gives the model no "
            "packed_seq_params: give lengths of whole sequences"
        )
    return {name: _cut(name, value, here) for name, value in arguments.items()}


def _is_of_several(here: Slice) -> bool:
    """Whether the microbatch of a slice is known to have several documents."""
    length = sum(here.sizes) if here.sequence is None else here.sequence.length
    return len(here.sizes) > 1 or (len(here.sizes) == 1 and length < here.total)


def require_hidden(arguments: dict[str, Any], here: Slice) -> None:
    """Raise ValueError where a mask lets a token of ``here`` see others than those up to it in its sequence.

    ``arguments`` are those of a whole microbatch, in whose mask True hides a key.
    """
    mask = arguments.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool or len(here.ranges) > 1:
        return
    _require_square(mask, here)
    ((begin, end),) = here.ranges
    rows = mask[..., begin:end, :]
    if not (rows[..., end:].all() and rows[..., : begin - here.start].all()):
        raise SettingError(
            f"the attention mask lets tokens {begin} to {end} of a microbatch see tokens after them, or of "
            "another document, which a slice has no keys of; give a causal mask of each document, or leave "
            "out --pipeline-slice-tokens"
        )


def _require_square(mask: torch.Tensor, here: Slice) -> None:
    for size in mask.shape[-2:]:
        _require_tokens("attention_mask", size, here)


def _cut(name: str, value: Any, here: Slice) -> Any:
    if name in _ALONG_LAST and isinstance(value, torch.Tensor):
        _require_tokens(name, value.shape[-1], here)
        return _joined([value[..., begin:end] for begin, end in here.ranges], -1)
    if name == "decoder_input" and isinstance(value, torch.Tensor):
        _require_tokens(name, len(value), here)
        return _joined([value[begin:end] for begin, end in here.ranges], 0)
    if name == "attention_mask" and isinstance(value, torch.Tensor) and len(here.ranges) == 1:
        _require_square(value, here)
        ((begin, end),) = here.ranges
        # A copy: what autograd saves of a view would keep the mask of the whole sequence.
        return value[..., begin:end, begin - here.start : end].clone()
    if name == "packed_seq_params" and value is not None and here.sizes:
        return _pack(value, here)
    if _has_tensor(value) or (name == "packed_seq_params" and value is not None):
        raise SettingError(
            f"slices of sequences do not know how to cut {name}, which the forward step gives to the model; "
            "leave it out, or leave out --pipeline-slice-tokens"
        )
    return value


def _has_tensor(value: Any, levels: int = 4) -> bool:
    """Whether ``value`` is a tensor or an array, or holds one, down to so many ``levels``."""
    if isinstance(value, torch.Tensor) or (hasattr(value, "__array__") and value.ndim):
        return True
    if not levels or isinstance(value, str | bytes | Enum) or callable(value):
        return False
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    elif is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in fields(value)]
    else:
        parts = getattr(value, "__dict__", {}).values()
    return any(_has_tensor(part, levels - 1) for part in parts)


def _joined(parts: list[torch.Tensor], dimension: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dimension)


def _require_tokens(name: str, tokens: int, here: Slice) -> None:
    if tokens != here.total:
        raise ValueError(
            f"the step was planned for {here.total} tokens of a microbatch, and its {name} has {tokens}; let "
            "lengths count all tokens of a row, padding included, and give as many rows as micro_batch_size"
        )


def _pack(given: PackedSeqParams, here: Slice) -> PackedSeqParams | None:
    """Return the lengths of the documents of a pack; None for one document, whose attention needs none."""
    if len(here.sizes) == 1:
        return None
    assert given.cu_seqlens_q is not None
    ends = torch.tensor(
        [0, *accumulate(here.sizes)], dtype=given.cu_seqlens_q.dtype, device=given.cu_seqlens_q.device
    )
    longest, known = max(here.sizes), {one.name for one in fields(given)}
    return replace(
        given,
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **dict.fromkeys(known.intersection(_OTHERS)),
        **({"total_tokens": sum(here.sizes)} if getattr(given, "total_tokens", None) else {}),
    )
