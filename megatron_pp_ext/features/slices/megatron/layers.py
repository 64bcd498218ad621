"""What slices change within a model: its arguments, its attention and its rotary positions.

Hooks of torch's modules do it, so that every class of attention which is called with a query, a key and a
value has slices, those of users included.  They do nothing unless a slice runs (``runtime.prefixes``).
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import unwrap_model

from megatron_pp_ext.features.slices.megatron.batches import cut
from megatron_pp_ext.features.slices.runtime.prefixes import Slice, running


class Call:
    """The call of a stage's model that a forward step made for a whole microbatch.

    ``arguments`` are those of the innermost module, by name, and ``output`` is what the call returned.
    """

    def __init__(self) -> None:
        self.arguments: dict[str, Any] | None = None
        self.output: Any = None


class Calls:
    """Watches the calls of a chunk's model, of which each slice gets its part."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self.call: Call | None = None
        inner = unwrap_model(chunk)
        inner.register_forward_pre_hook(self._before, with_kwargs=True)
        for module in {id(one): one for one in (inner, chunk)}.values():
            module.register_forward_hook(self._after)
        for module in inner.modules():
            attention = getattr(module, "core_attention", None)
            if isinstance(attention, torch.nn.Module):
                attention.register_forward_pre_hook(_with_prefix, with_kwargs=True)
                if isinstance(attention, DotProductAttention):
                    # Its kernel knows as many keys as queries.
                    attention.scale_mask_softmax.scaled_masked_softmax_fusion = False
            if isinstance(module, RotaryEmbedding):
                module.register_forward_pre_hook(_from_start, with_kwargs=True)
            if isinstance(module, YarnRotaryEmbedding):
                module.get_cached_cos_sin = partial(_part_of_cached, module.get_cached_cos_sin)

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        here = running()
        if here is None or self.call is None:
            return None
        arguments = _named(module.forward, args, kwargs)
        self.call.arguments = self.call.arguments or arguments
        return (), cut(arguments, here)

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.call is not None:
            self.call.output = output


def _named(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    return bound


def _with_prefix(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Let attention see the keys and values of the whole sequence up to the slice's end."""
    here = running()
    if here is None or here.sequence is None:
        return None
    arguments = _named(module.forward, args, kwargs)
    for what in ("key", "value"):
        arguments[what] = here.sequence.grown((module, what), arguments[what], here.start)
    if here.start:
        _mask(module, arguments, here)
    return (), arguments


def _mask(module: torch.nn.Module, arguments: dict[str, Any], here: Slice) -> None:
    """Let the slice's first token see all tokens before it: the diagonal ends at the last row and column."""
    if arguments.get("attn_mask_type") == AttnMaskType.causal and _is_of_engine(module):
        arguments["attn_mask_type"] = AttnMaskType.causal_bottom_right  # whatever mask is given besides
    if arguments.get("attention_mask") is not None or _is_of_engine(module):
        return
    device = arguments["query"].device
    rows = torch.arange(here.start, here.end, device=device)[:, None]
    arguments["attention_mask"] = (torch.arange(here.end, device=device) > rows)[None, None]


def _is_of_engine(module: torch.nn.Module) -> bool:
    return any("transformer_engine" in kind.__module__ for kind in type(module).__mro__)


def _from_start(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Let rotary positions begin at the slice's first token."""
    here = running()
    if here is None:
        return None
    arguments = _named(module.forward, args, kwargs)
    return (), {**arguments, "offset": arguments.get("offset", 0) + here.start}


def _part_of_cached(stock: Callable[..., Any], length: int, *more: Any, **named: Any) -> Any:
    """Return the cosines and sines of the slice's positions, which fused kernels read."""
    here = running()
    if here is None:
        return stock(length, *more, **named)
    return tuple(one[here.start : here.end] for one in stock(here.end, *more, **named))
