"""Layers of which each has a width of its own, or a single product in the place of attention or of its MLP.

Such models are found by neural architecture search (arXiv 2411.19146, section 2.1).
"""

from collections.abc import Callable
from typing import Any

from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.mlp import mlp
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.self_attention import attention
from megatron_pp_ext.job.blocks import Half, LayerBlock

_LINEAR_KERNELS = 4
"""The kernels that a forward starts; see ``mlp.MLP_KERNELS``."""


def block(costs: LayerCosts, described: LayerBlock) -> Part:
    """Return a layer as ``described``."""
    groups = {"num_query_groups": described.attention.size, "group_query_attention": True}
    width = {"ffn_hidden_size": described.mlp.size}
    return _half(costs, described.attention, attention, groups) + _half(costs, described.mlp, mlp, width)


def _half(
    costs: LayerCosts, described: Half, itself: Callable[[LayerCosts], Part], sizes: dict[str, Any]
) -> Part:
    if described.is_left_out:
        return Part()
    if described.is_linear:
        return _linear(costs)
    return itself(costs.of(**sizes) if described.size else costs)


def _linear(costs: LayerCosts) -> Part:
    """Return a product of the hidden size with itself, whose result is gathered, and its norm.

    Under sequence parallelism every rank then keeps a part of the tokens
    (megatron.core.transformer.heterogeneous.linear_replacements).
    """
    sizes = costs.sizes
    gathering = costs.kernels.gather(sizes.whole(sizes.hidden)) if sizes.share > 1 else 0.0
    again = gathering if costs.job.parallel.sequence_parallel else 0.0
    gathered = Part(forward_seconds=gathering, input_gradient_seconds=again)
    whole = costs.norm() + costs.products.column(sizes.hidden) + gathered + costs.dropped()
    return costs.kernels.launched(whole, _LINEAR_KERNELS)
