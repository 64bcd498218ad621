"""Operands that Transformer Engine gathered and that wait for W: this rank keeps its own part.

A quantized operand keeps its numbers and its scales in plain tensors of their own.  Those that the product of
a weight gradient reads have the tokens along one dimension, padded or not; by class (Transformer Engine 2.3
to 2.20, ``transformer_engine/pytorch/tensor/storage``, and ``pytorch/distributed.py`` for the gathers):

========================  ======================  =========================================
class                     attribute               shape, for T tokens and K features
========================  ======================  =========================================
``Float8Tensor``          ``_transpose``          [K, T]; or ``_data`` [T, K] for both uses
``MXFP8Tensor``           ``_columnwise_data``    [T, K]
..                        ``..._scale_inv``       [T / 32, padded to 4; K, padded to 128]
``Float8BlockwiseQ...``   ``_columnwise_data``    [K, T]
..                        ``..._scale_inv``       [T / 128; K, padded to 4]
``NVFP4Tensor``           ``_columnwise_data``    [K, T / 2]
..                        ``..._scale_inv``       [K, padded to 128; T / 16, padded to 4]
========================  ======================  =========================================

Where a rank's tokens are no whole number of blocks, Transformer Engine gathers in high precision and
quantizes then; such blocks belong to several ranks, and the operand stays whole.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.own_part import OwnPart


class _Tokens(NamedTuple):
    """Where a tensor has the tokens: along ``dim``, ``block`` of them in each entry."""

    dim: int
    block: int


_DATA, _SCALES = "_columnwise_data", "_columnwise_scale_inv"
_LAYOUTS: Mapping[str, Mapping[str, _Tokens]] = {
    "MXFP8": {_DATA: _Tokens(0, 1), _SCALES: _Tokens(0, 32)},
    "Float8BlockwiseQ": {_DATA: _Tokens(1, 1), _SCALES: _Tokens(0, 128)},
    "NVFP4": {_DATA: _Tokens(1, 2), _SCALES: _Tokens(1, 16)},
}


class OwnOperand:
    """A quantized operand of which only this rank's ``parts`` are kept, by the attributes they belong to."""

    def __init__(self, operand: Any, parts: Mapping[str, OwnPart]) -> None:
        self._operand, self._parts = operand, parts
        for attribute in parts:
            setattr(operand, attribute, None)

    @property
    def parts(self) -> tuple[OwnPart, ...]:
        return tuple(self._parts.values())

    def take(self) -> Any:
        """Return the operand, whole again; see ``OwnPart.take``."""
        for attribute, part in self._parts.items():
            setattr(self._operand, attribute, part.take())
        return self._operand


def own_operand(operand: Any, group: dist.ProcessGroup) -> Any:
    """Return this rank's own part of ``operand``, which ``group`` has gathered: an OwnPart or an OwnOperand.

    An operand that cannot be cut is returned as it is.
    """
    if type(operand) is torch.Tensor:
        return OwnPart.cut(operand, group)
    layout = _layout(operand)
    if layout is None or getattr(operand, "_with_gemm_swizzled_scales", False):
        return operand
    (attribute, data), *_ = layout.items()
    tokens = getattr(operand, attribute).shape[data.dim] * data.block
    if any(tokens % (dist.get_world_size(group) * place.block) for place in layout.values()):
        return operand
    parts = {
        attribute: OwnPart.cut(getattr(operand, attribute), group, place.dim, tokens // place.block)
        for attribute, place in layout.items()
    }
    return OwnOperand(operand, parts)


def whole(operand: Any) -> Any:
    """Return the operand that ``own_operand`` was given, gathered again."""
    return operand.take() if isinstance(operand, OwnPart | OwnOperand) else operand


def _layout(operand: Any) -> Mapping[str, _Tokens] | None:
    """Return the attributes of ``operand`` to cut; None for a class that is not known."""
    names = [kind.__name__ for kind in type(operand).__mro__]
    if any(name.startswith("Float8Tensor") for name in names):
        is_turned = operand._transpose is not None and not operand._transpose_invalid
        return {"_transpose": _Tokens(1, 1)} if is_turned else {"_data": _Tokens(0, 1)}
    if getattr(operand, "_is_2D_scaled", False):
        return None
    for prefix, layout in _LAYOUTS.items():
        if any(name.startswith(f"{prefix}Tensor") for name in names):
            return layout
    return None
