"""Tensors that keep their numbers in other tensors, as quantized ones do: by each protocol that there is."""

from typing import Any

import torch
from torch.utils._pytree import tree_map


class Wrapped(torch.Tensor):
    """One byte for each number, a scale, and a transposed copy once it is asked for.

    It names its tensors as torch's protocol has it, and as Transformer Engine does from 2.20 on.
    """

    parts = ("numbers", "transposed", "scale")

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, *_: Any) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(
        self, numbers: torch.Tensor, scale: torch.Tensor, transposed: torch.Tensor | None = None
    ) -> None:
        self.numbers, self.scale, self.transposed = numbers, scale, transposed

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [name for name in self.parts if getattr(self, name) is not None], None

    def transpose_once(self) -> None:
        """Make the copy that a backward reads, as an engine does in the first forward."""
        self.transposed = self.numbers.t().contiguous()

    def values(self) -> torch.Tensor:
        """Return the numbers that it stands for."""
        return self.numbers.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            (tensor,) = args
            return cls(tensor.numbers, tensor.scale, tensor.transposed)
        plain = tree_map(lambda value: value.values() if isinstance(value, Wrapped) else value, args)
        return func(*plain, **(kwargs or {}))


class OfOlderEngine(Wrapped):
    """As in Transformer Engine before 2.16: a method of its own names the tensors, but not the scales."""

    __tensor_flatten__ = property()  # hasattr() answers no

    def get_data_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.numbers, self.transposed


class WithEmptyStorage(OfOlderEngine):
    """As in Transformer Engine 2.16 and 2.18, where it has a storage, but nothing in it."""

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0)


KINDS = (Wrapped, OfOlderEngine, WithEmptyStorage)


def wrapped(kind: type[Wrapped], *shape: int) -> Wrapped:
    """Make a tensor of ``kind`` that stands for ones."""
    return kind(torch.ones(shape, dtype=torch.uint8), torch.ones(1))


def bytes_of(tensor: Wrapped) -> int:
    """The bytes that count for ``tensor``, with its scale where the protocol names it."""
    names = tensor.parts if type(tensor) is Wrapped else tensor.parts[:2]
    return sum(part.nbytes for name in names if (part := getattr(tensor, name)) is not None)


class Product(torch.autograd.Function):
    """Rows times a wrapped weight, which saves both as they are."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: Wrapped) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        weight.transpose_once()
        return rows @ weight.values().t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        return gradients[0] @ weight.values(), gradients[0].t() @ rows
