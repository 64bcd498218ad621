"""Attention between its projections: scores of queries and keys, and their products with the values.

Operations are those of whole sequences, as of arXiv 2401.10241, table 3: the causal mask hides half of them.
A sliding window (arXiv 2004.05150, section 3.1) hides more, and is counted in the same way.
"""

from megatron_pp_ext.costs.kernels import AttentionWork
from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.part import Part


def core(costs: LayerCosts, query: float, value: float, around: float, window: int) -> Part:
    """Return attention with queries of a width of ``query`` and values of ``value``, in all heads together.

    A token sees ``window`` tokens at most.  Meanwhile the keys and values of other context-parallel ranks,
    which have a width of ``around``, arrive.
    """
    model, sizes, kernels = costs.job.model, costs.sizes, costs.kernels
    is_fused, length = not costs.job.precision.is_unfused, model.seq_length
    pairs = sizes.tokens / sizes.share
    widths = 2 * (query + value)
    sinks = costs.job.attention.softmax_type
    # The score of a sink stands after all others where they are kept.
    scores = pairs * model.num_attention_heads * (length + (sinks != "vanilla"))
    forward, backward = kernels.attention(
        AttentionWork(
            widths * pairs * length,
            sizes.bytes * scores,
            is_fused,
            length / costs.job.parallel.context_parallel_size,
            width=(query + value) / 2 / model.num_attention_heads,
            # Unfused attention computes all scores, and then hides them.
            seen=met(window if is_fused else length, length) / (2 * length),
        )
    )
    results, gradients = pairs * value, pairs * (query + around)
    part = Part(
        activation_operations=widths * pairs * met(window, length),
        forward_seconds=kernels.ring(forward, sizes.cut(around), results),
        input_gradient_seconds=kernels.ring(backward, 2 * sizes.cut(around), gradients),
        after_forward=0.0 if is_fused else _kept_scores(costs, scores),
        parameters=model.num_attention_heads / sizes.share if sinks == "learnable" else 0.0,
    )
    return part.recomputed(after_forward=0) if "core_attn" in costs.recomputed else part


def met(window: float, length: float) -> float:
    """Return twice the mean number of keys of a query; for a full causal mask that is the sequence length.

    Of ``length`` tokens those before see less than the ``window``.
    """
    return window * (2 - window / length)


def turned(costs: LayerCosts, width: float) -> Part:
    """Return the costs of rotating, repeating or reordering ``width`` of queries, keys and values."""
    seconds = costs.kernels.copy(2 * costs.sizes.cut(width))
    return Part(forward_seconds=seconds, input_gradient_seconds=seconds)


def output(costs: LayerCosts, value: float) -> Part:
    """Return the bytes of attention's result, ``value`` wide, as the saved input of the product after it.

    Under FP8 that product has a quantized copy of its own.
    """
    copies = 1 + (costs.sizes.waiting if costs.sizes.waiting < 1 else 0)
    return Part(after_forward=copies * costs.sizes.cut(value))


def norm_weights(costs: LayerCosts, width: float) -> float:
    """Return the number of weights of a norm over ``width``."""
    return width * (1 if costs.job.model.normalization == "RMSNorm" else 2)


def _kept_scores(costs: LayerCosts, scores: float) -> float:
    """Return the bytes of attention's probabilities, which fused kernels do not keep."""
    has_dropout = costs.job.model.attention_dropout > 0
    # Dropout also keeps its result, and a mask of a byte for each probability.
    return scores * (costs.sizes.bytes * (1 + has_dropout) + has_dropout)
