"""A linear layer on plain torch whose backward comes in two halves, as in ``core.local_linear``."""

from typing import Any

import torch

from megatron_pp_ext.runtime.split import STORE, has_hooks


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        # Not saved as a tensor: autograd may give back an alias, and the optimizer does not read its .grad.
        ctx.weight, ctx.has_bias = weight, bias is not None
        return torch.nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        (input,), weight = ctx.saved_tensors, ctx.weight
        needs_input, needs_weight, _ = ctx.needs_input_grad
        rows, input_rows = _rows(gradient), _rows(input)

        def add_weight_gradient() -> None:
            product = rows.t().mm(input_rows)
            if weight.grad is None:
                weight.grad = product
            else:
                weight.grad.add_(product)

        weight_gradient = None
        if needs_weight and has_hooks(weight):
            weight_gradient = rows.t().mm(input_rows)
        elif needs_weight:
            STORE.defer(add_weight_gradient, input, gradient)
        input_gradient = gradient.matmul(weight) if needs_input else None
        return input_gradient, weight_gradient, rows.sum(0) if ctx.has_bias else None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a matrix; one that is a matrix already is not viewed, which saves microseconds."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.size(-1))


class SplitLinear(torch.nn.Linear):
    """A ``torch.nn.Linear`` whose weight gradient can be deferred; the gradients are the same numbers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product of ``input`` (..., in_features) and the weight, (..., out_features)."""
        return _SplitLinear.apply(input, self.weight, self.bias)
