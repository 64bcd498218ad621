"""The compiled kernels of Transformer Engine and apex that the tests need, in plain torch.

Signatures are those of ``transformer_engine_torch`` and ``fused_weight_gradient_mlp_cuda``; only what layers
without FP8 ask for.
"""

from typing import Any

import torch

TRANSFORMER_ENGINE = (
    "generic_gemm",
    "get_num_cublas_streams",
    "layernorm_bwd",
    "layernorm_fwd",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "te_general_grouped_gemm",
)


def generic_gemm(
    a: torch.Tensor,
    transposes_a: bool,
    b: torch.Tensor,
    transposes_b: bool,
    out: torch.Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: torch.Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    *unused: Any,
    **more: Any,
) -> tuple[Any, Any, Any, Any]:
    """``op(b) @ op(a)``: of rows, where the kernel counts columns.  ``grad`` asks for the bias's.

    That comes in the dtype of the output, as csrc/extensions/gemm.cpp makes it.
    """
    left = b.flatten(0, -2).t() if transposes_b else b
    right = a.t() if transposes_a else a.flatten(0, -2)
    product = left.matmul(right)
    bias_gradient = None
    if bias is not None and bias.numel():
        if grad:
            bias_gradient = b.flatten(0, -2).sum(0, dtype=product.dtype if out is None else out.dtype)
        else:
            product = product + bias
    if out is not None:
        product = out.add_(product) if accumulate else out.copy_(product)
    return product, bias_gradient, None, None


def get_num_cublas_streams() -> int:
    """How many workspaces a grouped product has."""
    return 1


def te_general_grouped_gemm(
    a: list[torch.Tensor],
    transposes_a: bool,
    b: list[torch.Tensor],
    transposes_b: bool,
    out: list[torch.Tensor],
    out_dtype: Any,
    rows: list[int],
    biases: list[torch.Tensor],
    bias_dtype: Any,
    is_one_output: bool,
    gelu_in: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    *unused: Any,
) -> list[torch.Tensor]:
    """A product for each group; ``out`` is one tensor of all groups' rows if ``is_one_output``."""
    parts = out[0].split(list(rows)) if is_one_output else out
    for left, right, part, bias in zip(a, b, parts, biases, strict=True):
        forward_bias = None if grad else bias
        generic_gemm(
            left, transposes_a, right, transposes_b, part, None, None, forward_bias, None, False, None, False,
            None, 0, accumulate,
        )  # fmt: skip
        if grad and bias.numel():
            bias.copy_(right.sum(0, dtype=bias.dtype))
    return biases


def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
    *unused: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm, mean and reciprocal deviation of every row."""
    normed, mean, deviation = torch.native_layer_norm(input, weight.shape, weight, bias, eps)
    return (normed if out is None else out.copy_(normed)), mean, deviation


def layernorm_bwd(
    gradient: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    weight: torch.Tensor,
    *unused: Any,
) -> tuple[torch.Tensor, ...]:
    """The gradients of input, weight and bias."""
    bias = torch.zeros_like(weight)
    return torch.ops.aten.native_layer_norm_backward(
        gradient, input, weight.shape, mean, deviation, weight, bias, [True, True, True]
    )


def rmsnorm_fwd(
    input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None, *unused: Any
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """The norm and reciprocal root mean square of every row."""
    scale = input.float().pow(2).mean(-1).add(eps).rsqrt()
    normed = (input * scale[:, None]).to(input.dtype) * weight
    return (normed if out is None else out.copy_(normed)), None, scale


def rmsnorm_bwd(
    gradient: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, *unused: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of input and weight."""
    normed = input * scale[:, None]
    inner = gradient * weight
    across = (inner * normed).mean(-1, keepdim=True)
    return (inner - normed * across) * scale[:, None], (gradient * normed).sum(0)


def wgrad_gemm_accum_fp32(input: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Apex's: add a weight's gradient to ``main_grad``."""
    main_grad.add_(gradient.t().matmul(input))


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
