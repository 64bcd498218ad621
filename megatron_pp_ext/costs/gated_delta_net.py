"""A gated delta net: linear attention whose state forgets and is corrected (arXiv 2412.06464, section 3).

It goes by chunks of 64 tokens: inside a chunk everything is a product of matrices, and between chunks one
state for each head is passed on.  Saved are the operands of flash-linear-attention's kernels and, for
each token, a row of the inverse of its chunk's matrix (``ChunkGatedDeltaRuleFunction``, fla-core 0.6.0).
"""

from megatron_pp_ext.costs.core_attention import norm_weights
from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.part import Part

_CHUNK = 64

_DELTA_KERNELS = 28
"""The kernels that a forward starts; see ``mlp.MLP_KERNELS``."""


def attention(costs: LayerCosts) -> Part:
    """Return a gated delta net and its norm; its products have no biases."""
    delta_net, sizes = costs.job.attention, costs.sizes
    keys = delta_net.linear_num_key_heads * delta_net.linear_key_head_dim
    values = delta_net.linear_num_value_heads * delta_net.linear_value_head_dim
    projected = 2 * keys + 2 * values + 2 * delta_net.linear_num_value_heads
    convolved = 2 * keys + values
    weights = convolved * delta_net.linear_conv_kernel_dim + 2 * delta_net.linear_num_value_heads
    whole = (
        costs.norm()
        + costs.products.column(projected, is_biased=False, is_normed=True)
        + _rule(costs, keys, values, projected)
        + _gated_norm(costs, values)
        + Part(parameters=weights / sizes.share)
        + costs.products.row(values, is_biased=False)
        + costs.dropped()
    )
    return costs.kernels.launched(whole, _DELTA_KERNELS)


def rule_operations(tokens: float, key: int, value: int) -> float:
    """Return the operations of the rule's forward for ``tokens`` of a head, which has these widths.

    These are a token's products with the keys and values of its chunk, those with the inverse, and three with
    the state.
    """
    return 2 * tokens * (_CHUNK * (3 * key + 2 * value) + 3 * key * value)


def _rule(costs: LayerCosts, keys: int, values: int, projected: int) -> Part:
    """Return the convolution, the norms of queries and keys, and the rule itself.

    Context-parallel ranks have all tokens of some heads meanwhile.
    """
    delta_net, sizes, kernels = costs.job.attention, costs.sizes, costs.kernels
    heads, key, value = (
        delta_net.linear_num_value_heads,
        delta_net.linear_key_head_dim,
        delta_net.linear_value_head_dim,
    )
    repeated = 2 * heads * key
    numbers = sizes.tokens / sizes.share
    operations = rule_operations(numbers * heads, key, value)
    operations += 2 * numbers * delta_net.linear_conv_kernel_dim * (2 * keys + values)
    forward, backward = kernels.delta_rule(operations)
    # The convolution, the norms, the copies of queries and keys for each head, those of values and gates.
    copied = 2 * (2 * keys + values) + 4 * keys + 2 * keys + repeated + 4 * values
    around = kernels.copy(sizes.cut(copied))
    exchanged = kernels.exchange(sizes.cut(projected)) + kernels.exchange(sizes.cut(values))
    return Part(
        activation_operations=operations,
        forward_seconds=forward + around + exchanged,
        input_gradient_seconds=backward + 2 * around + exchanged,
        after_forward=sizes.cut(projected + 2 * keys + repeated + values + _CHUNK * heads),
    )


def _gated_norm(costs: LayerCosts, values: int) -> Part:
    """Return the norm of the rule's result and its gate, which gdn_norm_out recomputes."""
    sizes = costs.sizes
    seconds = costs.kernels.copy(sizes.cut(5 * values))
    inputs = Part(
        after_forward=2 * sizes.cut(values),
        parameters=norm_weights(costs, costs.job.attention.linear_value_head_dim),
    )
    part = Part(
        forward_seconds=seconds,
        input_gradient_seconds=2 * seconds,
        after_forward=(1 + sizes.waiting) * sizes.cut(values),
    )
    return inputs + (part.recomputed(after_forward=0) if "gdn_norm_out" in costs.recomputed else part)
