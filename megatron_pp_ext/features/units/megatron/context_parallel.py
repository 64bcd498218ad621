"""Units that context-parallel ranks share: the batch, rotary positions, and the heads of attention.

A unit is cut from whole sequences first, then each rank of the group has a contiguous part of its tokens.
Around attention the ranks exchange heads for tokens (Ulysses, arXiv:2309.14509): each has all tokens
of the unit then, for its part of the heads, so that keys, values and what later slices owe them are kept for
that part alone.  Attention itself runs without context parallelism: Transformer Engine has no kernel for a
prefix under any of its kinds.  All ranks of the group run one schedule, and an action launches its exchanges
in the order of its layers; only forwards and input gradients have any.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_pp_ext.features.units.megatron.states import is_recurrent
from megatron_pp_ext.features.units.options import SLICE_FLAG
from megatron_pp_ext.features.units.runtime import Share, Slice
from megatron_pp_ext.features.units.units import Units
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.releases import CORE_0_18
from megatron_pp_ext.setting_error import SettingError


class Parts:
    """The tokens of ``units`` that this rank of a context-parallel ``group`` has.

    Its row of a microbatch has its part of each unit, one after another in the order of their numbers.
    """

    def __init__(self, units: Units, group: dist.ProcessGroup | None) -> None:
        self._units, self._group = units, group
        self.ranks = 1 if group is None else group.size()
        self._begins: dict[int, int] = {}
        for numbers in units.of_microbatch:
            counts = [units.units[number].tokens // self.ranks for number in numbers]
            self._begins.update(zip(numbers, accumulate(counts, initial=0), strict=False))

    def ranges(self, number: int) -> tuple[tuple[int, int], ...]:
        """Return the places of the tokens of a unit in this rank's row of its microbatch."""
        if self.ranks == 1:
            return self._units.positions(number)
        begin = self._begins[number]
        return ((begin, begin + self._units.units[number].tokens // self.ranks),)

    def total(self, microbatch: int) -> int:
        """Return the tokens that this rank has of a microbatch, in each row."""
        return sum(self._units.documents[microbatch]) // self.ranks

    def share(self, number: int) -> Share | None:
        """Return the part of a unit that this rank has; None where it has all."""
        if self.ranks == 1 or self._group is None:
            return None
        total = self.total(self._units.units[number].microbatch)
        return Share(self._group, self._places(number), self.ranges(number), total)

    def _places(self, number: int) -> tuple[tuple[int, int], ...]:
        """Return the places, in the whole microbatch, of the tokens that this rank has of a unit."""
        assert self._group is not None
        count = self._units.units[number].tokens // self.ranks
        first, last = self._group.rank() * count, (self._group.rank() + 1) * count
        places, before = list[tuple[int, int]](), 0
        for begin, end in self._units.positions(number):
            of_piece = begin + max(0, first - before), begin + min(end - begin, last - before)
            if of_piece[0] < of_piece[1]:
                places.append(of_piece)
            before += end - begin
        return tuple(places)

    def dealing(self, microbatch: int, keeps_wholes: bool) -> "Dealing | None":
        """Return how the batch of a microbatch is dealt; None where this rank has all."""
        if self.ranks == 1 or self._group is None:
            return None
        numbers = self._units.of_microbatch[microbatch]
        places = [torch.arange(*piece) for number in numbers for piece in self._places(number)]
        return Dealing(torch.cat(places), sum(self._units.documents[microbatch]), keeps_wholes)


class Dealing:
    """The ``places`` of this rank's tokens among the ``total`` in a row of a microbatch.

    With ``keeps_wholes`` it is known later what a tensor is a part of (``whole_of``).
    """

    def __init__(self, places: torch.Tensor, total: int, keeps_wholes: bool = False) -> None:
        self._places, self._total = places, total
        self._wholes: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if keeps_wholes else None
        self.is_done = False
        """Whether a batch was dealt."""

    def deal(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return ``batch`` with this rank's tokens; ValueError for a tensor of other rows.

        Lengths of documents stay those of the whole, and so does a mask of attention: after the exchange a
        rank has all tokens of a unit.
        """
        self.is_done = True
        dealt = dict(batch)
        for name, value in batch.items():
            if name in _WHOLE or not isinstance(value, torch.Tensor):
                continue
            if value.dim() < 2 or value.shape[1] != self._total:
                raise SettingError(
                    f"slices of sequences do not know how to divide {name}, of shape {tuple(value.shape)}, "
                    f"among context-parallel ranks, whose microbatch has {self._total} tokens; leave it out, "
                    f"or leave out {SLICE_FLAG}"
                )
            dealt[name] = value.index_select(1, self._places.to(value.device))
            if self._wholes is not None:
                self._wholes.append((dealt[name], value))
        return dealt

    def note_wholes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the whole of each of the ``tensors`` that a batch had, or of a copy in another format."""
        known = self._wholes or []
        for tensor in tensors:
            same = next((whole for part, whole in known if part is tensor), None)
            if same is None:
                copied = (whole for part, whole in known if _is_copy(part, tensor))
                same = next(copied, None)
            if same is not None:
                _wholes[tensor] = same.to(tensor.dtype)


def _is_copy(part: torch.Tensor, tensor: torch.Tensor) -> bool:
    return part.shape == tensor.shape and torch.equal(part.to(tensor.dtype), tensor)


_wholes = WeakTensorKeyDictionary()


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the whole microbatch, of which a batch had given ``tensor``, else itself."""
    whole: torch.Tensor = _wholes.get(tensor, tensor)
    return whole


_WHOLE = {
    *("attention_mask", "cu_seqlens", "cu_seqlens_argmin", "cu_seqlens_padded", "max_seqlen"),
    *("local_cp_size", "hybrid_cp_group"),
}
"""What a batch has besides numbers for its tokens."""

_dealing: Dealing | None = None


@contextmanager
def dealt_by(dealing: Dealing | None) -> Iterator[None]:
    """Let ``dealing`` divide what Megatron's functions would divide among context-parallel ranks."""
    global _dealing
    before, _dealing = _dealing, dealing
    try:
        yield
    finally:
        _dealing = before


@hook(
    "megatron.core.utils:_get_batch_on_this_cp_rank_per_sequence_balancing",
    "batch cp_group",
    "slices of sequences among context-parallel ranks",
    before={
        "megatron.core.utils:get_pretrain_batch_on_this_cp_rank": "batch cp_group",
        "megatron.core.utils:get_batch_on_this_cp_rank": "batch cp_group",
    },
)
@hook(
    "megatron.core.utils:_get_batch_on_this_cp_rank_per_document_balancing",
    "batch cp_group",
    "packs of documents among context-parallel ranks",
    before={"megatron.core.utils:get_sft_batch_on_this_cp_rank": "batch cp_group"},
    since=CORE_0_18,
)
def deal_by_units(stock: Callable[..., Any], batch: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Give this rank its part of each unit where a microbatch has units, and Megatron's part of others."""
    if _dealing is None:
        return stock(batch, *args, **kwargs)
    dealt = _dealing.deal(batch)
    batch.update(dealt)
    return batch


def require_dealt(arguments: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise ValueError for a batch, among the ``arguments`` of a model, that was not dealt by its units."""
    if _dealing is None:
        return
    if _dealing.is_done:
        given = (arguments.get(name) for name in names)
        _dealing.note_wholes(tensor for tensor in given if isinstance(tensor, torch.Tensor))
        return
    for name in names:
        if isinstance(arguments.get(name), torch.Tensor):
            raise SettingError(
                f"the forward step gives the model {name} that megatron.core.utils.get_batch_on_this_cp_rank "
                "has not divided among context-parallel ranks, and slices are divided there; read batches "
                f"through it, or leave out {SLICE_FLAG}"
            )


class _Exchange(torch.autograd.Function):
    """Sends part r of a tensor, along dimension 0, to rank r; its gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        tensor = tensor.contiguous()
        result = torch.empty_like(tensor)
        dist.all_to_all_single(result, tensor, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return _Exchange.apply(gradient, ctx.group), None


def to_heads(group: dist.ProcessGroup, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Exchange tensors [tokens / ranks, rows, heads, width] for [tokens, rows, heads / ranks, width].

    All go in one message, whatever their heads and widths are.
    """
    ranks = group.size()
    by_rank = [part.unflatten(2, (ranks, -1)).movedim(2, 0).flatten(3) for part in parts]
    received = _Exchange.apply(torch.cat(by_rank, dim=3), group).flatten(0, 1)
    split = received.split([part.shape[3] for part in by_rank], dim=2)
    return [
        whole.unflatten(2, (-1, part.shape[3])).to(part.dtype).contiguous()
        for whole, part in zip(split, parts, strict=True)
    ]


def to_tokens(group: dist.ProcessGroup, output: torch.Tensor) -> torch.Tensor:
    """Exchange [tokens, rows, width of some heads] for [tokens / ranks, rows, width of all heads]."""
    received: torch.Tensor = _Exchange.apply(output.unflatten(0, (group.size(), -1)), group)
    return received.movedim(0, 2).flatten(2)


def copies_of_keys(heads: int, ranks: int) -> int:
    """Return how often keys and values of so many ``heads`` are repeated so that ``ranks`` divide them."""
    return ranks // gcd(heads, ranks)


def exchange_heads(module: torch.nn.Module, arguments: dict[str, Any], part: Slice) -> None:
    """Give the attention ``module`` all tokens of ``part``, for this rank's heads.

    Until ``exchange_tokens`` the module works for so many heads, without context parallelism.
    """
    share = part.share
    assert share is not None
    ranks = share.group.size()
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    copies = copies_of_keys(key.shape[-2], ranks)
    if copies > 1:
        key, value = (tensor.repeat_interleave(copies, dim=-2) for tensor in (key, value))
    query, key, value = to_heads(share.group, query, key, value)
    changes = {name: getattr(module, name) // ranks for name in _OF_QUERIES if hasattr(module, name)}
    changes |= {name: getattr(module, name) * copies // ranks for name in _OF_KEYS if hasattr(module, name)}
    if len(part.sizes) > 1:
        query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        arguments["packed_seq_params"] = _packed(part.sizes, query.device)
        if hasattr(module, _OF_VALUES) and value.shape[-1] != query.shape[-1]:
            # As Megatron's multi-latent attention does for packs (_prepare_mla_core_attention_value).
            value = torch.nn.functional.pad(value, (0, query.shape[-1] - value.shape[-1]))
            changes[_OF_VALUES] = value.shape[-1]
    arguments.update(query=query, key=key, value=value)
    _change(module, changes)


def exchange_tokens(module: torch.nn.Module, part: Slice, output: Any) -> Any:
    """Return the ``output`` of attention for this rank's tokens and all heads; None where it has failed."""
    changed = _restore(module)
    if part.share is None or output is None:
        return None
    if _OF_VALUES in changed:
        output = output.unflatten(-1, (-1, changed[_OF_VALUES]))[..., : getattr(module, _OF_VALUES)].flatten(
            -2
        )
    if output.dim() == 2:  # of a pack
        output = output[:, None]
    return to_tokens(part.share.group, output)


@contextmanager
def without_group(module: torch.nn.Module) -> Iterator[None]:
    """Let the attention ``module`` work without context parallelism."""
    _change(module, {})
    try:
        yield
    finally:
        _restore(module)


_OF_QUERIES = "num_attention_heads_per_partition", "hidden_size_per_partition"
_OF_KEYS = "num_query_groups_per_partition", "num_gqa_groups_per_partition"
_OF_VALUES = "hidden_size_per_attention_head_v"
"""The sizes that Megatron's and Transformer Engine's attention keep."""

_changed: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
"""What was changed of a module that is at work, and what it was before."""


def _change(module: torch.nn.Module, changes: dict[str, Any]) -> None:
    """Let the attention ``module`` have other sizes, and no context-parallel group."""
    changes = dict(changes)
    if hasattr(module, "cp_group"):  # Transformer Engine's
        changes["cp_group"] = None
    elif getattr(module, "pg_collection", None) is not None:
        changes["pg_collection"] = groups = copy.copy(module.pg_collection)
        groups.cp = None  # type: ignore[union-attr]
    before = {name: getattr(module, name) for name in changes}
    _changed.setdefault(id(module), []).append((changes, before))
    for name, value in changes.items():
        setattr(module, name, value)


def _restore(module: torch.nn.Module) -> dict[str, Any]:
    """Undo the latest change of ``module``, and return it; nothing where there is none."""
    if not (entries := _changed.get(id(module))):
        return {}
    changes, before = entries.pop()
    for name, value in before.items():
        setattr(module, name, value)
    if not entries:
        del _changed[id(module)]
    return changes


@lru_cache(maxsize=64)
def _packed(sizes: tuple[int, ...], device: torch.device) -> PackedSeqParams:
    ends = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
    longest = max(sizes)
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)


def why_not_shared(model: torch.nn.Module) -> str:
    """Return why context-parallel ranks cannot share the slices of ``model``; empty if they can.

    These are what no flag tells; see ``units.rules`` for the others.
    """
    for module in model.modules():
        if is_recurrent(module):
            return f"the exchange of {type(module).__name__} takes the order of whole sequences"
        if isinstance(module, MultimodalRotaryEmbedding):
            return "its rotary positions (MultimodalRotaryEmbedding) are divided by halves of whole sequences"
        attention = getattr(module, "core_attention", None)
        if not isinstance(attention, torch.nn.Module):
            continue
        if not any(hasattr(attention, name) for name in _OF_KEYS):
            return f"it is not known how {type(attention).__name__} works for a part of its heads"
        if getattr(attention, "softmax_offset", None) is not None:
            return "its attention adds numbers for all heads (softmax_type), and each rank has a part of them"
        if getattr(attention, "return_max_logit", False):
            return "the maximum of each head's scores (qk_clip) is counted where all heads are"
    return ""


def has_ranks(module: torch.nn.Module) -> bool:
    """Whether a rotary embedding divides positions among context-parallel ranks."""
    group = getattr(module, "cp_group", None)
    return group is not None and group.size() > 1


def of_this_rank(table: torch.Tensor, part: Slice, start: int = 0) -> torch.Tensor:
    """Return the rows of a ``table`` of positions for this rank's tokens; row ``start`` is the first."""
    tokens = part.end - part.start
    if part.share is None:
        return table[start : start + tokens]
    begin, end = part.share.of(tokens)
    if len(part.sizes) > 1:
        return table[start + _within(part.sizes, table.device)[begin:end]]
    return table[start + begin : start + end]


@lru_cache(maxsize=64)
def _within(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the positions of a pack's tokens in their documents."""
    return torch.cat([torch.arange(size) for size in sizes]).to(device)
