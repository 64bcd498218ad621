"""What slices change within a model: its arguments, its attention and its rotary positions.

Hooks of torch's modules do it, so that every class of attention which is called with a query, a key and a
value has slices, those of users included.  They do nothing unless a slice runs (``units.runtime``).
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import unwrap_model

from megatron_pp_ext.features.units.megatron.context_parallel import (
    exchange_heads,
    exchange_tokens,
    has_ranks,
    of_this_rank,
    require_dealt,
)
from megatron_pp_ext.features.units.megatron.mtp import keep_wholes, refused_model, repeated
from megatron_pp_ext.features.units.megatron.states import (
    carry_states,
    is_recurrent,
    is_sparse,
    mask_of_sparse,
    share_indexer,
)
from megatron_pp_ext.features.units.runtime import Slice, running
from megatron_pp_ext.setting_error import SettingError


class Calls:
    """The calls of a ``chunk``'s model, whose layers work on slices from now on.

    Hooks belong to a module: one that has them already, because another runner or another model has it too,
    or because it is a copy, gets no more.  The model may go while this is held.
    """

    def __init__(self, chunk: torch.nn.Module) -> None:
        model = unwrap_model(chunk)
        self._model = weakref.ref(model)
        self.reads_masks = False
        """Whether attention looks at the mask that the batch has; the engine's goes by the kind alone."""
        self.refused = refused_model(getattr(model, "config", None))
        """Why the model cannot work on slices, by its kind of attention; empty where it can."""
        _hook(model, _with_part_of_batch)
        for module in model.modules():
            if isinstance(attention := getattr(module, "core_attention", None), torch.nn.Module):
                self._add(module, attention)
            if is_recurrent(module):
                self.refused = self.refused or carry_states(module)
            if isinstance(module, RotaryEmbedding):
                _hook(module, _from_start)
                _hook_after(module, _rows_of_rank)
            if isinstance(module, YarnRotaryEmbedding):
                stock = module.get_cached_cos_sin
                if getattr(stock, "func", None) is not _part_of_cached:
                    module.get_cached_cos_sin = partial(_part_of_cached, stock)
        modules, calls = repeated(model)
        for module in modules:
            module.calls_in_forward = calls  # type: ignore[assignment]

    def _add(self, module: torch.nn.Module, attention: torch.nn.Module) -> None:
        """Let the ``attention`` of ``module`` see earlier slices."""
        for part in (module, attention):
            self.refused = self.refused or _refused_kind(getattr(part, "attn_mask_type", None))
        self.reads_masks = self.reads_masks or not _is_of_engine(attention)
        _hook(attention, with_prefix)
        _hook_after(attention, _of_own_tokens)
        if is_sparse(attention):
            self.refused = self.refused or share_indexer(attention)
        if isinstance(attention, DotProductAttention):
            # Its kernel knows as many keys as queries.
            attention.scale_mask_softmax.scaled_masked_softmax_fusion = False

    def are_of(self, module: torch.nn.Module) -> bool:
        """Whether ``module`` is the model itself, without what wraps it."""
        return self._model() is module


def _hook(module: torch.nn.Module, function: Callable[..., Any]) -> None:
    if function not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(function, with_kwargs=True)


def _hook_after(module: torch.nn.Module, function: Callable[..., Any]) -> None:
    if function not in module._forward_hooks.values():
        module.register_forward_hook(function, with_kwargs=True, always_call=True)


class Call:
    """The call of a stage's model that a forward step made for a whole microbatch.

    ``arguments`` are those of the innermost module, by name, None before the call.
    """

    def __init__(self, calls: Calls) -> None:
        self.of = calls
        self.arguments: dict[str, Any] | None = None
        self._writes: dict[str, int] = {}

    def note(self, arguments: dict[str, Any]) -> None:
        """Keep the ``arguments`` of the call, which is that of the microbatch's first unit."""
        self.arguments, self._writes = arguments, _writes(arguments)

    def again(self) -> dict[str, Any]:
        """Return the arguments for another unit; ValueError where the forward step has written to one."""
        assert self.arguments is not None
        for name, count in _writes(self.arguments).items():
            if count != self._writes[name]:
                raise SettingError(
                    f"the forward step writes to {name} after its model was called with it, and slices of "
                    "sequences call the model with it again; write to a copy, or leave out "
                    "--pipeline-slice-tokens"
                )
        return self.arguments


def _writes(arguments: dict[str, Any]) -> dict[str, int]:
    """Return how often each tensor was written to; torch does not count those of inference mode."""
    return {
        name: value._version
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and not value.is_inference()
    }


_call: Call | None = None


@contextmanager
def calling(call: Call) -> Iterator[None]:
    """Let ``call`` be the one whose arguments a unit of its microbatch gets its part of."""
    global _call
    before, _call = _call, call
    try:
        yield
    finally:
        _call = before


def _with_part_of_batch(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Let the model of the call have the unit's part of its arguments."""
    part = running()
    if part is None or _call is None or not _call.of.are_of(module):
        return None
    arguments = named(module, args, kwargs)
    if _call.arguments is None:
        require_dealt(arguments, _ALONG_LAST)
        _call.note(arguments)
    if _call.of.reads_masks:
        require_hidden(arguments, part)
    return (), cut(arguments, part)


def named(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name.

    Where the module's own ``forward`` takes any, as ``*args``, those of its class's base have the names.
    """
    forwards = (vars(kind).get("forward") for kind in type(module).__mro__)
    for forward in (module.forward, *(method.__get__(module) for method in forwards if method is not None)):
        names = [
            name
            for name, parameter in inspect.signature(forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if len(names) >= len(args):
            return {**dict(zip(names, args, strict=False)), **kwargs}
    raise TypeError(f"{type(module).__name__}.forward does not name what it is called with: give it names")


def with_prefix(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Let attention see the keys and values of the whole sequence up to the slice's end."""
    part = running()
    if part is None or (part.sequence is None and part.share is None):
        return None
    arguments = named(module, args, kwargs)
    if why := _refused_kind(arguments.get("attn_mask_type")):
        raise SettingError(why)
    if part.share is not None:
        exchange_heads(module, arguments, part)
    for what in ("key", "value"):
        if part.sequence is None or arguments[what] is None:
            continue  # a whole sequence, or values that are parts of the keys
        calls = calls_in_forward(module)
        arguments[what] = part.sequence.grown((module, what), arguments[what], part.start, calls)
    if part.start:
        _mask(module, arguments, part)
    return (), arguments


def _of_own_tokens(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Let attention return what this rank's tokens get; also where it has failed, to leave it as it was."""
    part = running()
    return None if part is None or part.share is None else exchange_tokens(module, part, output)


def calls_in_forward(module: torch.nn.Module | None) -> int:
    """Return how often each forward calls the attention ``module``."""
    return int(getattr(module, "calls_in_forward", 1))


def _mask(module: torch.nn.Module, arguments: dict[str, Any], part: Slice) -> None:
    """Let the slice's first token see all tokens before it: the diagonal ends at the last row and column."""
    if arguments.get("attn_mask_type") == AttnMaskType.causal and _is_of_engine(module):
        arguments["attn_mask_type"] = AttnMaskType.causal_bottom_right  # whatever mask is given besides
    if not is_sparse(module) and (arguments.get("attention_mask") is not None or _is_of_engine(module)):
        return
    device = arguments["query"].device
    rows = torch.arange(part.start, part.end, device=device)[:, None]
    arguments["attention_mask"] = (torch.arange(part.end, device=device) > rows)[None, None]
    if is_sparse(module):
        mask_of_sparse(arguments, arguments["attention_mask"])


def _refused_kind(kind: Any) -> str:
    """Return why no slice can have a ``kind`` of mask, an ``AttnMaskType`` or its name; empty if it can."""
    name = getattr(kind, "name", kind)
    if name in (None, AttnMaskType.causal.name):
        return ""
    return (
        f"slices of sequences need attention whose mask is causal, and a layer of this model is "
        f"of kind {name}, in which tokens may see later ones; leave out --pipeline-slice-tokens"
    )


def _is_of_engine(module: torch.nn.Module) -> bool:
    return any("transformer_engine" in kind.__module__ for kind in type(module).__mro__)


def _from_start(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Let rotary positions begin at the slice's first token."""
    part = running()
    if part is None:
        return None
    arguments = named(module, args, kwargs)
    changes: dict[str, Any] = {"offset": arguments.get("offset", 0) + part.start}
    if has_ranks(module):
        changes["packed_seq"] = True  # with all positions, of which ``_rows_of_rank`` takes this rank's
    return (), {**arguments, **changes}


def _rows_of_rank(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Let rotary positions be those of this rank's tokens."""
    part = running()
    if part is None or output is None or not has_ranks(module):
        return None
    if isinstance(output, tuple):  # with a factor
        table, *factors = output
        return (of_this_rank(table, part), *factors)
    return of_this_rank(output, part)


def _part_of_cached(stock: Callable[..., Any], length: int, *more: Any, **named: Any) -> Any:
    """Return the cosines and sines of the slice's positions, which fused kernels read."""
    part = running()
    if part is None:
        return stock(length, *more, **named)
    if has_ranks(stock.__self__):  # type: ignore[attr-defined]
        named["packed_seq"] = True
    return tuple(of_this_rank(table, part, part.start) for table in stock(part.end, *more, **named))


_ALONG_LAST = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")
"""The arguments of Megatron's models that have a number for each token, with the tokens last."""

_OTHERS = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "tokens_per_sample")
"""Fields of documents in some releases besides their lengths, which a pack lacks."""


def cut(arguments: dict[str, Any], part: Slice) -> dict[str, Any]:
    """Return the ``arguments`` of a model's forward for the tokens of ``part``.

    A mask of attention keeps the columns of all tokens before.  Lengths of documents (``packed_seq_params``)
    become those of a pack, and are left out for a single document.  ValueError for a tensor of which it is
    not known how to cut it, and for documents other than the step was planned for.
    """
    tells = arguments.get("packed_seq_params")
    if len(part.sizes) == 1 and tells is None:
        tells = arguments.get("attention_mask")
    if tells is None and _is_of_several(part):
        raise ValueError(
            "a microbatch has several documents by its lengths, but its forward step gives the model no "
            "packed_seq_params: give lengths of whole sequences"
        )
    parts = {name: _cut(name, value, part) for name, value in arguments.items()}
    keep_wholes(parts, arguments, _ALONG_LAST)
    return parts


def _is_of_several(part: Slice) -> bool:
    """Whether the microbatch of a slice is known to have several documents."""
    length = sum(part.sizes) if part.sequence is None else part.sequence.length
    return len(part.sizes) > 1 or (len(part.sizes) == 1 and length < part.total)


def require_hidden(arguments: dict[str, Any], part: Slice) -> None:
    """Raise ValueError where a mask lets a token of ``part`` see others than those up to it in its sequence.

    ``arguments`` are those of a whole microbatch, in whose mask True hides a key.
    """
    mask = arguments.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool or len(part.ranges) > 1:
        return
    _require_square(mask, part)
    ((begin, end),) = part.ranges
    rows = mask[..., begin:end, :]
    if not (rows[..., end:].all() and rows[..., : begin - part.start].all()):
        raise SettingError(
            f"the attention mask lets tokens {begin} to {end} of a microbatch see tokens after them, or of "
            "another document, which a slice has no keys of; give a causal mask of each document, or leave "
            "out --pipeline-slice-tokens"
        )


def _require_square(mask: torch.Tensor, part: Slice) -> None:
    for size in mask.shape[-2:]:
        _require_tokens("attention_mask", size, part.total)


def _cut(name: str, value: Any, part: Slice) -> Any:
    if name in _ALONG_LAST and isinstance(value, torch.Tensor):
        _require_tokens(name, value.shape[-1], part.total_here)
        return _joined([value[..., begin:end] for begin, end in part.ranges_here], -1)
    if name == "decoder_input" and isinstance(value, torch.Tensor):
        _require_tokens(name, len(value), part.total_here)
        return _joined([value[begin:end] for begin, end in part.ranges_here], 0)
    if name == "attention_mask" and isinstance(value, torch.Tensor) and len(part.ranges) == 1:
        _require_square(value, part)
        ((begin, end),) = part.ranges
        # A copy: what autograd saves of a view would keep the mask of the whole sequence.
        return value[..., begin:end, begin - part.start : end].clone()
    if name == "packed_seq_params" and value is not None and part.sizes:
        return _pack(value, part)
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


def _require_tokens(name: str, tokens: int, total: int) -> None:
    if tokens != total:
        raise ValueError(
            f"the step was planned for {total} tokens of a microbatch, and its {name} has {tokens}; let "
            "lengths count all tokens of a row, padding included, and give as many rows as micro_batch_size"
        )


def _pack(params: PackedSeqParams, part: Slice) -> PackedSeqParams | None:
    """Return the lengths of the documents of a pack; None for one document, whose attention needs none."""
    assert params.cu_seqlens_q is not None
    if part.share is not None and len(part.sizes) > 1:
        return None  # attention gets them after the exchange of heads
    if len(part.sizes) == 1:
        # Padding repeats the last end.
        if not _is_of_several(part) and len(ends := params.cu_seqlens_q) > 2 and len(ends.unique()) > 2:
            raise SettingError(
                "the forward step gives the model packed_seq_params of several documents, and the step was "
                "planned for one; let data have cu_seqlens, or give lengths"
            )
        return None
    ends = torch.tensor(
        [0, *accumulate(part.sizes)], dtype=params.cu_seqlens_q.dtype, device=params.cu_seqlens_q.device
    )
    longest, names = max(part.sizes), {field.name for field in fields(params)}
    # Of the number of tokens Megatron makes that of the document of each, for Mamba-2.
    is_numbered = any(getattr(params, name, None) is not None for name in ("total_tokens", "seq_idx"))
    return replace(
        params,
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **dict.fromkeys(names.intersection(_OTHERS)),
        **({"total_tokens": sum(part.sizes)} if is_numbered else {}),
    )
