"""Cut the backward of Megatron's own linear layers in two.

``ColumnParallelLinear`` and ``RowParallelLinear`` (and so the attention, MLP and output layers of the local
transformer implementation) all end in one autograd function.  Its backward is replaced while an I is running,
which needs the input's gradient alone; at any other time stock code runs untouched.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron_pp_ext.integration.core.data_parallel import Gradients, defer_weights
from megatron_pp_ext.integration.patching import substitute
from megatron_pp_ext.runtime.split import STORE, has_hooks

_LINEAR = (
    "ctx input weight bias gradient_accumulation_fusion allreduce_dgrad sequence_parallel grad_output_buffer "
    "wgrad_deferral_limit tp_group"
)


@substitute(
    "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication",
    (_LINEAR, f"{_LINEAR} gtp_remat_size", f"{_LINEAR} gtp_remat_size output_dtype"),
    "the backward in two halves",
)
def split_backward(stock: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Derive from Megatron's linear function one that can leave its weight gradient for later.

    What is added to the gradients, and in which order, is what stock adds: the numbers are the same.
    """

    class SplitLinearWithGradAccumulation(stock):  # type: ignore[valid-type,misc]
        @staticmethod
        def forward(ctx: Any, input: torch.Tensor, weight: torch.nn.Parameter, *others: Any) -> Any:
            # Saved tensors may come back as aliases, without the attributes that Megatron gave the parameter.
            ctx.parameter = weight
            return stock.forward(ctx, input, weight, *others)

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            if not STORE.is_collecting or not ctx.needs_input_grad[1] or has_hooks(ctx.parameter):
                return stock.backward(ctx, *gradients)
            input, _ = ctx.saved_tensors
            # The dtype of logits may be another than their input's (--output-logit-dtype).
            gradient = gradients[0].to(input.dtype)
            work = defer_weights([ctx.parameter], _weight_gradient(ctx, input, gradient))
            STORE.defer(work, input, gradient)
            input_gradient = _input_gradient(ctx, input, gradient)
            bias_gradient = gradient.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
            others = [None] * (len(ctx.needs_input_grad) - 3)
            return input_gradient, None, bias_gradient, *others

    return SplitLinearWithGradAccumulation


def _input_gradient(ctx: Any, input: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    product = gradient.matmul(ctx.parameter)
    if ctx.sequence_parallel:
        shard = torch.empty_like(input, requires_grad=False)
        torch.distributed.reduce_scatter_tensor(shard, product, group=ctx.tp_group)
        return shard
    if ctx.allreduce_dgrad:
        torch.distributed.all_reduce(product, group=ctx.tp_group)
    return product


def _weight_gradient(ctx: Any, input: torch.Tensor, gradient: torch.Tensor) -> Callable[[], Gradients]:
    weight, sequence_parallel, tp_group = ctx.parameter, ctx.sequence_parallel, ctx.tp_group
    fused = ctx.gradient_accumulation_fusion

    def weight_gradient() -> Gradients:
        # The gathered input is not stashed: under sequence parallelism only the shard outlives I.
        whole = gather_from_sequence_parallel_region(input, group=tp_group) if sequence_parallel else input
        gradient_2d, input_2d = prepare_input_tensors_for_wgrad_compute(gradient, whole)
        if fused:
            _accumulate_fused(input_2d, gradient_2d, weight)
            return []
        return [(weight, gradient_2d.t().matmul(input_2d))]

    return weight_gradient


def _accumulate_fused(input: torch.Tensor, gradient: torch.Tensor, weight: Any) -> None:
    import fused_weight_gradient_mlp_cuda as kernels  # apex's; Megatron refused the flag without it

    if weight.main_grad.dtype == torch.float32:
        kernels.wgrad_gemm_accum_fp32(input, gradient, weight.main_grad)
    else:
        kernels.wgrad_gemm_accum_fp16(input, gradient, weight.main_grad)
    weight.grad_added_to_main_grad = True
