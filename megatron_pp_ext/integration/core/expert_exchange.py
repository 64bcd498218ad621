"""Products of a W run while an I exchanges tokens between the ranks of experts (``schedule.beside``).

It is the exchange of Megatron's all-to-all dispatcher.  DeepEP and HybridEP exchange tokens in kernels of
their own.  In pairs, a forward runs with the exchange.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron_pp_ext.integration.patching import substitute
from megatron_pp_ext.runtime.split import STORE

_EXCHANGE = "ctx group input output_split_sizes input_split_sizes"


@substitute(
    "megatron.core.tensor_parallel.mappings:_AllToAll",
    (_EXCHANGE, f"{_EXCHANGE} use_nccl_stream"),
    "weight gradients of experts while tokens travel",
)
def hide_exchanges(stock: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Derive from Megatron's exchange one whose backward lets other work run until its tokens are there."""

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
