"""The router of a layer of experts (arXiv 1701.06538; with biases for balance, arXiv 2412.19437)."""

from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.orthogonal import matrix
from megatron_pp_ext.costs.part import Part

ROUTER_KERNELS = 25
"""The kernels of routing and ordering tokens; see ``mlp.MLP_KERNELS``."""

_KEPT_NUMBERS = 3
"""The numbers in fp32 that are kept for each token and expert: scores, probabilities, and where they go."""


def router(costs: LayerCosts) -> Part:
    """Return the router, whose weight every tensor-parallel rank has whole, for its part of the tokens.

    Its gradient is not left for W, since it is no linear layer of its own.  The biases that balance experts
    are no parameters.
    """
    model, kernels = costs.job.model, costs.kernels
    tokens = costs.sizes.tokens / costs.job.parallel.sequence_ranks
    experts, hidden = model.num_experts, model.hidden_size
    forward = kernels.product(tokens, experts, hidden, is_output=True)
    backward = kernels.product(tokens, hidden, experts, is_output=True)
    backward += kernels.product(hidden, experts, tokens, is_output=True)
    scores = 4 * tokens * experts
    moving = kernels.copy(2 * _KEPT_NUMBERS * scores)
    return matrix(costs.job.memory, hidden, experts) + Part(
        activation_operations=2 * tokens * experts * hidden,
        forward_seconds=forward + moving,
        input_gradient_seconds=backward + moving,
        after_forward=_KEPT_NUMBERS * scores,
        parameters=experts * (hidden + model.add_bias_linear),
    )
