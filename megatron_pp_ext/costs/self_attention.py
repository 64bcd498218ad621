"""Self-attention with its norm and its projections (arXiv 1706.03762; grouped queries: arXiv 2305.13245).

Models may also have: norms of queries and keys (arXiv 2302.05442, section 2), a gate of the output (arXiv
2505.06708), sinks (arXiv 2508.10925, section 2.2), which ``core_attention`` counts.
"""

from dataclasses import replace

from megatron_pp_ext.costs.core_attention import core, norm_weights, output, turned
from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.part import Part

_FUSED_KERNELS, _UNFUSED_KERNELS = 11, 16
"""The kernels that a forward starts; see ``mlp.MLP_KERNELS``."""

_ROTARY = ("rope", "yarn", "mrope")


def attention(costs: LayerCosts, window: int | None = None) -> Part:
    """Return self-attention in which a token sees ``window`` tokens, or all of them."""
    model, options, is_unfused = costs.job.model, costs.job.attention, costs.job.precision.is_unfused
    query = model.head_width * model.num_attention_heads
    keys = model.head_width * model.key_heads
    gate = query if options.attention_output_gate else 0
    projected = query + gate + 2 * keys
    is_rotary = model.position_embedding_type in _ROTARY
    ordered = query + 2 * keys if is_unfused else 0
    whole = (
        costs.norm()
        + costs.products.column(projected, is_normed=True)
        + _normed(costs, query, keys, projected)
        + turned(costs, (query + keys if is_rotary else 0) + ordered)
        + core(costs, query, query, 2 * keys, window or model.seq_length)
        + Part(after_forward=costs.sizes.cut(_kept(costs, query, keys, projected)))
        + _gated(costs, gate)
        + output(costs, query)
        + costs.products.row(query)
        + costs.dropped()
    )
    if model.add_qkv_bias and not model.add_bias_linear:
        whole += Part(parameters=projected / costs.sizes.share)
    return costs.kernels.launched(whole, _UNFUSED_KERNELS if is_unfused else _FUSED_KERNELS)


def _kept(costs: LayerCosts, query: int, keys: int, projected: int) -> int:
    """Return the width of queries, keys and values as attention keeps them.

    Attention in single products repeats keys and values for every query, unless it is computed again.  Values
    that are not repeated stay where they were projected, besides new queries and keys.
    """
    model, options = costs.job.model, costs.job.attention
    if not costs.job.precision.is_unfused:
        return query + 2 * keys
    has_norms = options.qk_layernorm or options.qk_l2_norm
    is_new = has_norms or model.position_embedding_type in _ROTARY
    if keys == query:
        return projected + (query + keys if is_new else 0)
    if "core_attn" in costs.recomputed:
        return query + (keys if is_new else 0) + (0 if has_norms else projected)
    return 3 * query


def _normed(costs: LayerCosts, query: int, keys: int, projected: int) -> Part:
    """Return the norms of queries and keys, which save their inputs.

    Unfused attention keeps it where it was projected, and queries once more where they are ordered by group.
    """
    options = costs.job.attention
    if not options.qk_layernorm and not options.qk_l2_norm:
        return Part()
    width = query + keys
    if costs.job.precision.is_unfused:
        width = 0 if keys == query else query + projected
    return replace(
        turned(costs, query + keys),
        after_forward=costs.sizes.cut(width),
        parameters=2 * norm_weights(costs, costs.job.model.head_width) if options.qk_layernorm else 0.0,
    )


def _gated(costs: LayerCosts, gate: int) -> Part:
    """Return the product of attention's result with the sigmoid of a ``gate``, which keeps both."""
    size = costs.sizes.cut(gate)
    return Part(
        forward_seconds=costs.kernels.copy(3 * size),
        input_gradient_seconds=costs.kernels.copy(5 * size),
        after_forward=2 * size,
    )
