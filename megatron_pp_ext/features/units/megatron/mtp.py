"""Multi-token prediction (MTP) on slices: tokens and labels of the next slice, and losses by microbatches.

A prediction for a token is made from the tokens after it, so Megatron rolls tokens, positions, labels and
masks by one for each layer.  Of a slice it would roll what belongs to the next one out of reach.  So the
whole microbatch is rolled, by its own documents, and a slice gets its part of that.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_pp_ext.around import bound
from megatron_pp_ext.features.units.megatron.context_parallel import whole_of
from megatron_pp_ext.features.units.runtime import Slice, running
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.releases import CORE_0_17
from megatron_pp_ext.setting_error import SettingError


@dataclass(frozen=True, slots=True)
class _Whole:
    """The numbers of a microbatch, tokens last, of which a slice has a part; ``packed`` are its documents.

    The part has ``times`` these numbers.
    """

    numbers: torch.Tensor
    packed: Any
    times: int = 1


_wholes = WeakTensorKeyDictionary()
"""The ``_Whole`` of each part of a slice."""

_rolled = WeakTensorKeyDictionary()
"""What Megatron returns for the whole numbers that it rolls: those of the next token, and their sum."""

_ones = WeakTensorKeyDictionary()
"""The masks of microbatches that come without one, by their labels."""

_of_loss: tuple[_Whole, _Whole, torch.Tensor] | None = None
"""The labels and the mask of the losses that are being computed, and what Megatron gets as the mask.

It rolls copies of labels.
"""


def refused_model(config: Any) -> str:
    """Return why no slices can have the MTP layers of a model's ``config``; empty where they can."""
    if not getattr(config, "mtp_num_layers", None):
        return ""
    if getattr(config, "mtp_hsm", False):
        return (
            "slices of sequences have no hidden states of the next slice, which mtp_hsm rolls; unset it, or "
            "leave out --pipeline-slice-tokens"
        )
    if not hasattr(multi_token_prediction, "process_mtp_loss"):
        return (
            "slices of sequences with multi-token prediction need megatron-core 0.17, before which its "
            "losses are divided by the tokens of a call; leave out mtp_num_layers, or --pipeline-slice-tokens"
        )
    return ""


def repeated(model: torch.nn.Module) -> tuple[Iterable[torch.nn.Module], int]:
    """Return the modules of an MTP layer that forwards of ``model`` call several times, and how often."""
    block = getattr(model, "mtp", None)
    if block is None or not getattr(block, "mtp_use_repeated_layer", False):
        return (), 1
    return block.modules(), block.config.mtp_num_layers


def keep_wholes(parts: Mapping[str, Any], arguments: Mapping[str, Any], names: Iterable[str]) -> None:
    """Note of which ``arguments`` for a microbatch the ``parts`` are that its slice is called with.

    ``names`` are those of numbers for each token.
    """
    for name in names:
        if isinstance(parts.get(name), torch.Tensor):
            whole = whole_of(arguments[name])
            _wholes[parts[name]] = _Whole(whole, arguments.get("packed_seq_params"))


def _part(whole: _Whole, part: Slice) -> torch.Tensor:
    ranges = part.ranges if part.share is None else part.share.places
    pieces = [whole.numbers[..., begin:end] for begin, end in ranges]
    result = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
    if whole.times > 1:
        result = result * whole.times
    _wholes[result] = whole
    return result


@hook(
    "megatron.core.transformer.multi_token_prediction:roll_tensor",
    (
        "tensor shifts dims cp_group packed_seq_params",
        "tensor shifts dims cp_group packed_seq_params return_sum",
    ),
    "multi-token prediction for the last tokens of a slice",
)
def roll_whole(stock: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a slice's part of the whole microbatch's numbers of the next token, and the sum of all.

    Megatron divides losses by the sum of a mask, which so is the microbatch's.
    """
    part, call = running(), bound(stock, *args, **kwargs)
    numbers = call.arguments["tensor"]
    if part is None or numbers is None:
        return stock(*args, **kwargs)
    whole = _wholes.get(numbers) or _whole_of_loss(numbers)
    if whole is None:
        raise SettingError(
            f"multi-token prediction rolls a tensor of {tuple(numbers.shape)} along its tokens that is none "
            "of a slice's tokens, positions, labels or masks as the forward step gives them to the model, "
            "and the next slice's part of it is not known; leave it out (padding_mask under "
            "--sequence-parallel, for example), or leave out --pipeline-slice-tokens"
        )
    if part.share is not None and whole.numbers.shape[-1] != part.total:
        raise SettingError(
            "multi-token prediction rolls a tensor of which a context-parallel rank has a part, and that of "
            "other ranks is not known; give the model what get_batch_on_this_cp_rank returns, or leave out "
            "--pipeline-slice-tokens"
        )
    if whole.numbers not in _rolled:
        call.arguments |= {"tensor": whole.numbers, "packed_seq_params": whole.packed, "cp_group": None}
        call.arguments.pop("return_sum", None)
        _rolled[whole.numbers] = stock(*call.args, **call.kwargs)
    rolled, total = _rolled[whole.numbers]
    return _part(replace(whole, numbers=rolled), part), total


def _whole_of_loss(numbers: torch.Tensor) -> _Whole | None:
    """Return the whole of what ``count_whole`` has handed over: the mask itself, or else a copy of labels."""
    if _of_loss is None:
        return None
    labels, mask, handed = _of_loss
    return mask if numbers is handed else labels


_LOSS = (
    "hidden_states labels loss_mask output_layer output_weight runtime_gather_output is_training "
    "compute_language_model_loss config cp_group"
)


@hook(
    "megatron.core.transformer.multi_token_prediction:process_mtp_loss",
    (
        f"{_LOSS} tp_group packed_seq_params scale_logits_fn input_ids",
        f"{_LOSS} packed_seq_params scale_logits_fn",
        f"{_LOSS} packed_seq_params",
    ),
    "losses of multi-token prediction that are divided by the tokens of a whole microbatch",
    since=CORE_0_17,
)
def count_whole(stock: Any, *args: Any, **kwargs: Any) -> Any:
    """Let Megatron count the tokens of the microbatch's mask; what it rolls are a slice's parts."""
    global _of_loss
    part, call = running(), bound(stock, *args, **kwargs)
    arguments = call.arguments
    labels, mask, tokens = arguments["labels"], arguments["loss_mask"], arguments.get("input_ids")
    if part is None or (labels is None and tokens is None):
        return stock(*args, **kwargs)
    is_derived = labels is None  # as for reinforcement learning, whose mask then goes with the labels
    if is_derived:
        labels, _ = multi_token_prediction.roll_tensor(tokens)
    of_labels = _wholes[labels]
    of_mask = _mask_of(of_labels) if mask is None else _wholes[mask]
    if is_derived:
        mask, _ = multi_token_prediction.roll_tensor(_part(of_mask, part))
        of_mask = _wholes[mask]
    # Megatron sums this mask and rolls it, and looks at no more of it.
    handed = of_mask.numbers
    if part.share is not None:
        # It takes the mean over context-parallel ranks of what is divided by the sum of a rolled mask, and
        # the sum of what is also multiplied by that of this one (calculate_per_token_loss).
        of_mask, handed = replace(of_mask, times=part.share.ranks), handed / part.share.ranks
    arguments |= {"labels": labels, "loss_mask": handed}
    before, _of_loss = _of_loss, (of_labels, of_mask, handed)
    try:
        return stock(*call.args, **call.kwargs)
    finally:
        _of_loss = before


def _mask_of(labels: _Whole) -> _Whole:
    """Return a mask for all tokens, of the same kind as stock's."""
    if labels.numbers not in _ones:
        _ones[labels.numbers] = torch.ones_like(labels.numbers)
    return _Whole(_ones[labels.numbers], labels.packed)
