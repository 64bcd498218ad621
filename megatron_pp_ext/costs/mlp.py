"""A dense MLP with its norm."""

from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.part import Part

MLP_KERNELS = 8
"""The kernels that a forward starts.  They are counted roughly, here and for other kinds of layers; what is
fitted is their product with the system's ``kernel_seconds``."""


def mlp(costs: LayerCosts) -> Part:
    """Return a dense MLP and its norm."""
    inside = feed_forward(costs, costs.job.model.mlp_width)
    inside = inside.recomputed(kept=0) if "mlp" in costs.recomputed else inside
    return costs.kernels.launched(costs.norm() + inside + costs.dropped(), MLP_KERNELS)


def feed_forward(costs: LayerCosts, inner: int, copies: int = 1, experts: int = 1) -> Part:
    """Return both products of an MLP and its activation function, for ``copies`` times the tokens.

    These are spread over ``experts`` of this rank.
    """
    gates = costs.job.model.gates
    through = copies * costs.sizes.cut((gates + 1) * inner)
    activation = Part(
        forward_seconds=costs.kernels.copy(through),
        input_gradient_seconds=costs.kernels.copy(through + copies * costs.sizes.cut(gates * inner)),
        after_forward=copies * costs.sizes.cut((gates + costs.sizes.waiting) * inner),
    )
    into = costs.products.column(gates * inner, copies, experts)
    return into + activation + costs.products.row(inner, copies, experts)
