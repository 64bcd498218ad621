"""Self-attention with its norm and its projections."""

from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.part import Part

_FUSED_KERNELS, _UNFUSED_KERNELS = 11, 16
"""The kernels that a forward starts; see ``mlp.MLP_KERNELS``."""


_ROTARY = ("rope", "yarn", "mrope")


def attention(costs: LayerCosts) -> Part:
    """Return self-attention with its norm and its projections."""
    model, is_unfused = costs.job.model, costs.job.precision.is_unfused
    query = model.head_width * model.num_attention_heads
    keys_and_values = 2 * model.head_width * model.key_heads
    projected = query + keys_and_values
    core = _core(costs, query, keys_and_values)
    if "core_attn" in costs.recomputed:
        core = core.recomputed(kept=0)
    # Attention in single products repeats keys and values for every query.
    if model.add_qkv_bias and not model.add_bias_linear:
        core += Part(parameters=projected / costs.sizes.share)
    kept = Part(after_forward=costs.sizes.cut(query + (3 * query if is_unfused else projected)))
    if costs.sizes.waiting < 1:
        # Beside what attention keeps of its output there is the quantized copy of the product behind it.
        kept += Part(after_forward=costs.sizes.waiting * costs.sizes.cut(query))
    whole = (
        costs.norm()
        + costs.products.column(projected)
        + core
        + kept
        + costs.products.row(query)
        + costs.dropped()
    )
    return costs.kernels.launched(whole, _UNFUSED_KERNELS if is_unfused else _FUSED_KERNELS)


def _core(costs: LayerCosts, query: int, keys_and_values: int) -> Part:
    """Return attention itself; meanwhile the keys and values of other context-parallel ranks arrive."""
    model, is_unfused = costs.job.model, costs.job.precision.is_unfused
    operations = 4 * costs.sizes.tokens * model.seq_length * query / costs.sizes.share
    scores = costs.sizes.tokens * model.seq_length * model.num_attention_heads / costs.sizes.share
    forward, backward = costs.kernels.attention(
        operations,
        costs.sizes.bytes * scores,
        not is_unfused,
        model.seq_length / costs.job.parallel.context_parallel_size,
        model.head_width,
    )
    around = costs.sizes.cut(keys_and_values)
    results, gradients = (
        costs.sizes.tokens * width / costs.sizes.share for width in (query, query + keys_and_values)
    )
    rotated = query + keys_and_values / 2 if model.position_embedding_type in _ROTARY else 0
    if is_unfused:
        rotated += query + keys_and_values  # put in the order of heads
    turning = costs.kernels.copy(2 * costs.sizes.cut(rotated))
    return Part(
        activation_operations=operations,
        forward_seconds=costs.kernels.ring(forward, around, results) + turning,
        input_gradient_seconds=costs.kernels.ring(backward, 2 * around, gradients) + turning,
        after_forward=_kept_scores(costs, scores),
    )


def _kept_scores(costs: LayerCosts, scores: float) -> float:
    """Return the bytes of attention's probabilities, which fused kernels do not keep."""
    if not costs.job.precision.is_unfused:
        return 0.0
    has_dropout = costs.job.model.attention_dropout > 0
    # Dropout also keeps its result, and a mask of a byte for each probability.
    return scores * (costs.sizes.bytes * (1 + has_dropout) + has_dropout)
