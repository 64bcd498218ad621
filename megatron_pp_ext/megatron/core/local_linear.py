"""Cuts the backward of Megatron's own linear layers in two, and runs products of a W in exchanges of an I."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute
from torch.utils.weak import WeakIdKeyDictionary

from megatron_pp_ext.megatron.core.data_parallel import Gradients, defer_weights
from megatron_pp_ext.megatron.core.parameters import has_second_use
from megatron_pp_ext.megatron.patching import substitute
from megatron_pp_ext.runtime.split import STORE, Layer, OwnPart, has_hooks

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

    The summands of gradients, and their order, are stock's: the numbers are the same.

    ``ColumnParallelLinear`` and ``RowParallelLinear`` (and so the attention, MLP and output layers of the
    local transformer implementation) all end in one autograd function.  Its backward is replaced while an I
    is running, which needs the input's gradient alone; at any other time stock code runs untouched.
    """

    class SplitLinearWithGradAccumulation(stock):  # type: ignore[valid-type,misc]
        @staticmethod
        def forward(ctx: Any, input: torch.Tensor, weight: torch.nn.Parameter, *more: Any) -> Any:
            # Saved tensors may come back as aliases, without the attributes that Megatron gave the parameter.
            ctx.parameter = weight
            return stock.forward(ctx, input, weight, *more)

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            if not STORE.is_collecting or not ctx.needs_input_grad[1] or has_hooks(ctx.parameter):
                return _with_dummy(ctx, stock.backward(ctx, *gradients))
            input, _ = ctx.saved_tensors
            # The dtype of logits may be another than their input's (--output-logit-dtype).
            gradient = gradients[0].to(input.dtype)
            input_gradient, message = _input_gradient(ctx, input, gradient)
            _defer(ctx, input, gradient, Layer.SENDS_NOTHING if message is None else Layer.SENDS)
            bias_gradient = gradient.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
            if message is not None:
                message.wait()
            more = [None] * (len(ctx.needs_input_grad) - 3)
            return input_gradient, None, bias_gradient, *more

    return SplitLinearWithGradAccumulation


def _with_dummy(ctx: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the ``results`` of a whole backward, with a dummy for a weight whose kernel added its gradient.

    Megatron makes one itself unless the saved weight came back as an alias, as under --pipeline-trace.  An
    overlapped reduction asks for it.
    """
    weight = ctx.parameter
    is_added = ctx.gradient_accumulation_fusion and hasattr(weight, "grad_added_to_main_grad")
    if not (is_added and ctx.needs_input_grad[1] and results[1] is None):
        return results
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    dummy = make(weight.shape, dtype=weight.dtype, device=weight.device)
    return results[0], dummy, *results[2:]


def _input_gradient(
    ctx: Any, input: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, dist.Work | None]:
    """Return the gradient of ``input``, and the message that completes it where ranks each have a part."""
    product = gradient.matmul(ctx.parameter)
    if ctx.sequence_parallel:
        shard = torch.empty_like(input, requires_grad=False)
        return shard, dist.reduce_scatter_tensor(shard, product, group=ctx.tp_group, async_op=True)
    if ctx.allreduce_dgrad:
        return product, dist.all_reduce(product, group=ctx.tp_group, async_op=True)
    return product, None


def _defer(ctx: Any, input: torch.Tensor, gradient: torch.Tensor, layer: Layer) -> None:
    """Leave the weight gradient for W, and of what was or will be gathered for it this rank's part alone."""
    weight, fused = ctx.parameter, ctx.gradient_accumulation_fusion
    operands: list[torch.Tensor | OwnPart] = [gradient, input]
    if ctx.sequence_parallel:
        rows, *dimensions = input.shape
        shape = torch.Size([rows * ctx.tp_group.size(), *dimensions])
        operands[1] = OwnPart(input, ctx.tp_group, shape)
    elif (group := _GROUPS.get(weight)) is not None and not STORE.runs_soon:
        operands[0] = OwnPart.cut(gradient, group)

    def weight_gradient() -> Gradients:
        whole = (operand.take() if isinstance(operand, OwnPart) else operand for operand in operands)
        gradient_2d, input_2d = prepare_input_tensors_for_wgrad_compute(*whole)
        if fused:
            _accumulate_fused(input_2d, gradient_2d, weight)
            return []
        return [(weight, gradient_2d.t().matmul(input_2d))]

    parts = [operand for operand in operands if isinstance(operand, OwnPart)]
    tensors = (operand.part if isinstance(operand, OwnPart) else operand for operand in operands)
    work = defer_weights([weight], weight_gradient)
    if layer is Layer.SENDS_NOTHING and not getattr(weight, "allreduce", True):
        layer = Layer.IS_EXPERT
    STORE.defer(work, *tensors, parts=parts, layer=layer, is_free=not has_second_use(weight))


_GROUPS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The tensor-parallel group of each row-parallel weight whose layer scatters its output along the sequence.

Such a layer does so outside of the linear function, which therefore gets the gradient of its output gathered
and cannot know.
"""


def note_row_layers(model: Iterable[torch.nn.Module]) -> None:
    """Note the row-parallel layers in the chunks of ``model`` whose output gradients are gathered."""
    for chunk in model:
        for module in chunk.modules():
            if (
                isinstance(module, RowParallelLinear)
                and module.sequence_parallel
                and not module.explicit_expert_comm
            ):
                _GROUPS[module.weight] = module.tp_group


def _accumulate_fused(input: torch.Tensor, gradient: torch.Tensor, weight: Any) -> None:
    import fused_weight_gradient_mlp_cuda as kernels  # apex's; Megatron refused the flag without it

    if weight.main_grad.dtype == torch.float32:
        kernels.wgrad_gemm_accum_fp32(input, gradient, weight.main_grad)
    else:
        kernels.wgrad_gemm_accum_fp16(input, gradient, weight.main_grad)
    weight.grad_added_to_main_grad = True


_EXCHANGE = "ctx group input output_split_sizes input_split_sizes"


@substitute(
    "megatron.core.tensor_parallel.mappings:_AllToAll",
    (_EXCHANGE, f"{_EXCHANGE} use_nccl_stream"),
    "weight gradients of experts while tokens travel",
)
def hide_exchanges(stock: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Derive from Megatron's exchange one whose backward lets other work run until its tokens are there.

    It is the exchange of Megatron's all-to-all dispatcher.  DeepEP and HybridEP exchange tokens in kernels of
    their own.  In pairs, a forward runs with the exchange.
    """

    class HiddenExchange(stock):  # type: ignore[valid-type,misc]
        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            is_of_tokens = gradients[0].dim() > 1  # their probabilities are too few to hide
            if ctx.group.size() == 1 or not is_of_tokens or not STORE.hides_exchanges:
                return stock.backward(ctx, *gradients)
            gradient = gradients[0].contiguous()
            sizes = ctx.input_split_sizes
            shape = gradient.shape if sizes is None else (sum(sizes), *gradient.shape[1:])
            back = gradient.new_empty(shape)
            message = dist.all_to_all_single(
                back, gradient, sizes, ctx.output_split_sizes, group=ctx.group, async_op=True
            )
            STORE.hide_exchange()
            assert message is not None
            message.wait()
            return None, back, *[None] * (len(ctx.needs_input_grad) - 2)

    return HiddenExchange
