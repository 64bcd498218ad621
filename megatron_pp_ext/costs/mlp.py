"""A dense MLP with its norm."""

from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.part import Part

MLP_KERNELS = 8
"""The kernels that a forward starts.  They are counted roughly, here and for other kinds of layers; what is
fitted is their product with the system's ``kernel_seconds``."""


def mlp(costs: LayerCosts) -> Part:
    """Return a dense MLP and its norm."""
    inside = feed_forward(costs, inner_width(costs))
    inside = inside.recomputed(kept=0) if "mlp" in costs.recomputed else inside
    return costs.kernels.launched(costs.norm() + inside + costs.dropped(), MLP_KERNELS)


def feed_forward(costs: LayerCosts, inner: int, copies: int = 1, experts: int = 1) -> Part:
    """Return both products of an MLP and its activation function, for ``copies`` times the tokens.

    These are spread over ``experts`` of this rank.
    """
    through = copies * costs.sizes.cut((costs.gates + 1) * inner)
    activation = Part(
        forward_seconds=costs.kernels.copy(through),
        input_gradient_seconds=costs.kernels.copy(through + copies * costs.sizes.cut(costs.gates * inner)),
        after_forward=copies * costs.sizes.cut((costs.gates + costs.sizes.waiting) * inner),
    )
    into = costs.products.column(costs.gates * inner, copies, experts)
    return into + activation + costs.products.row(inner, copies, experts)


def inner_width(costs: LayerCosts) -> int:
    """Return the width of an MLP; if none is given, Megatron's default.

    It is 4 times the hidden size, or two thirds of that, in multiples of 64, for a gated MLP.
    """
    if costs.args.ffn_hidden_size:
        return int(costs.args.ffn_hidden_size)
    return 8 * costs.sizes.hidden // 3 // 64 * 64 if costs.args.swiglu else 4 * costs.sizes.hidden
