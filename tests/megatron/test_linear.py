"""The cut of Megatron's linear function alone, beside a function that ends as Megatron's does."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from megatron_pp_ext.megatron.core import local_linear
from megatron_pp_ext.megatron.core.local_linear import split_backward
from megatron_pp_ext.runtime.activation_meter import ActivationMeter
from megatron_pp_ext.runtime.split import STORE, Owner

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
    """What waits for W has the input's dtype, too, and not the logits' fp32."""
    stock, held = gradients(Whole, dtype), []

    def in_halves(loss):
        with STORE.collecting(SLOT):
            loss.backward()
        held.append(STORE.meter.live_bytes)
        STORE.run(SLOT)

    STORE.meter = ActivationMeter([])
    try:
        ours = gradients(split_backward(Whole), dtype, in_halves)
    finally:
        STORE.meter = None
    assert held == [dtype.itemsize * ROWS * (WIDTH + OUT)]
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.dtype == dtype and theirs.any()
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("kept_in", "kernel"),
    [(torch.float32, "wgrad_gemm_accum_fp32"), (torch.bfloat16, "wgrad_gemm_accum_fp16")],
)
def test_the_fused_kernel_goes_by_the_gradients_dtype(kept_in, kernel, monkeypatch):
    """Weights in bf16 often have gradients in fp32; the weight is marked as one that has its gradient."""
    kernels = Mock()
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", kernels)
    weight = torch.nn.Parameter(torch.zeros(OUT, WIDTH, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(OUT, WIDTH, dtype=kept_in)
    input, gradient = (torch.zeros(ROWS, size, dtype=torch.bfloat16) for size in (WIDTH, OUT))
    local_linear._accumulate_fused(input, gradient, weight)
    ((name, operands, _),) = kernels.method_calls
    assert name == kernel
    assert [id(one) for one in operands] == [id(input), id(gradient), id(weight.main_grad)]
    assert weight.grad_added_to_main_grad is True


def in_layer(frozen: bool, has_bias: bool, run):
    """The gradients of input, weight and bias of a layer, and how many slots waited for W."""
    torch.manual_seed(0)
    input = torch.randn(ROWS, 2, WIDTH, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(OUT, WIDTH), requires_grad=not frozen)
    bias = torch.nn.Parameter(torch.randn(OUT)) if has_bias else None
    run(split_backward(WithBias).apply(input, weight, bias).square().sum())
    return input.grad, weight.grad, bias.grad if has_bias else None


class WithBias(Whole):
    """The same with a bias, whose gradient is a sum."""

    @staticmethod
    def forward(ctx, input, weight, bias):
        Whole.forward(ctx, input, weight, bias is not None)
        return torch.nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        input, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        return gradient @ weight, rows.t() @ input.flatten(0, -2), rows.sum(dim=0) if ctx.use_bias else None


def test_biases_have_whole_gradients_in_i():
    stock = in_layer(False, True, lambda loss: loss.backward())
    for ours, theirs in zip(in_layer(False, True, in_halves), stock, strict=True):
        assert theirs.any() and torch.equal(ours, theirs)


def test_a_frozen_weight_leaves_nothing_for_w():
    waiting = []

    def first_half(loss):
        with STORE.collecting(SLOT):
            loss.backward()
        waiting.append(len(STORE._work[SLOT]))
        STORE.run(SLOT)

    input_gradient, weight_gradient, _ = in_layer(True, False, first_half)
    assert (waiting, weight_gradient) == ([0], None)
    assert input_gradient.any()
