"""The cut of Megatron's linear function alone, beside a function that ends as Megatron's does."""

from types import SimpleNamespace

import pytest
import torch

from megatron_pp_ext.integration.hooks.local_linear import split_backward
from megatron_pp_ext.runtime.activation_meter import ActivationMeter, Owner
from megatron_pp_ext.runtime.split import STORE

ROWS, WIDTH, OUT = 6, 4, 3
SLOT = Owner(0, 0)


class Whole(torch.autograd.Function):
    """Answers in fp32 whatever it is given, and casts the gradient that comes back to its input's dtype."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, input, weight, has_bias):
        ctx.save_for_backward(input, weight)
        ctx.use_bias = has_bias
        ctx.gradient_accumulation_fusion = ctx.allreduce_dgrad = ctx.sequence_parallel = False
        ctx.tp_group = SimpleNamespace(size=lambda: 1)
        return input.float() @ weight.float().t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        input, weight = ctx.saved_tensors
        gradient = gradient.to(input.dtype)
        return gradient @ weight, gradient.flatten(0, -2).t() @ input.flatten(0, -2), None


def gradients(function, dtype, run=lambda loss: loss.backward()):
    """The gradients of input and weight; that of the logits is fp32 with digits that bf16 has not."""
    torch.manual_seed(0)
    input = torch.randn(ROWS, 1, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(OUT, WIDTH, dtype=dtype))
    run((function.apply(input, weight, False) / 3).square().sum())
    return input.grad, weight.grad


def in_halves(loss):
    with STORE.collecting(SLOT):
        loss.backward()
    STORE.run(SLOT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_another_dtype_have_stock_s_gradients(dtype):
    stock = gradients(Whole, dtype)
    ours = gradients(split_backward(Whole), dtype, in_halves)
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.dtype == dtype and theirs.any()
        assert torch.equal(mine, theirs)


def test_what_waits_for_w_is_cast_too():
    """In bf16, as the input is, and not in the logits' fp32."""
    held = []

    def count(loss):
        with STORE.collecting(SLOT):
            loss.backward()
        held.append(STORE.meter.live_bytes)
        STORE.run(SLOT)

    STORE.meter = ActivationMeter([])
    try:
        gradients(split_backward(Whole), torch.bfloat16, count)
    finally:
        STORE.meter = None
    assert held == [2 * ROWS * (WIDTH + OUT)]
