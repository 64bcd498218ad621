"""A dense MLP with its norm."""

from megatron_pp_ext.costs.activation_function import activation
from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.part import Part

MLP_KERNELS = 8
"""The kernels that a forward starts.  They are counted roughly, here and for other kinds of layers; what is
fitted is their product with the system's ``kernel_seconds``."""


def mlp(costs: LayerCosts) -> Part:
    """Return a dense MLP and its norm."""
    inside = feed_forward(costs, costs.job.model.mlp_width, is_normed=True)
    if costs.job.precision.use_transformer_engine_op_fuser:
        inside = inside.undivided
    inside = inside.recomputed(after_forward=0) if "mlp" in costs.recomputed else inside
    return costs.kernels.launched(costs.norm() + inside + costs.dropped(), MLP_KERNELS)


def feed_forward(costs: LayerCosts, inner: int, is_normed: bool = False) -> Part:
    """Return both products of an MLP and its activation function; see ``ProductCosts.column``."""
    into = costs.products.column(costs.job.model.gates * inner, is_normed=is_normed)
    return into + activation(costs, inner) + costs.products.row(inner)
