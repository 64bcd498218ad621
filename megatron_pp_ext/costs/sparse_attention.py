"""Sparse attention: an indexer chooses some keys for every query (arXiv 2512.02556, section 2.1).

Queries attend to compressed keys and values, whose expansion is absorbed into queries and results (arXiv
2405.04434, appendix C), so that the product with its weight is one of activations, and waits for no W.
Without --dsa-kernel-backend all scores are computed, in fp32, and kept.  With one, kernels are taken to reach
the rate of fused attention over as many tokens as are chosen (FlashMLA's README has 640 TFLOP/s for such a
forward on an H800).
"""

from dataclasses import replace

from megatron_pp_ext.costs.core_attention import met, turned
from megatron_pp_ext.costs.kernels import AttentionWork
from megatron_pp_ext.costs.latent_attention import compression
from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.part import Part

_SPARSE_KERNELS, _INDEXING_KERNELS = 30, 25
"""The kernels that a forward starts; see ``mlp.MLP_KERNELS``."""

_KEPT_OF_SCORES = 4 + 4 + 3
"""The bytes of each score that softmax in single operations keeps besides its result: its exponential, its
quotient, and three masks (``masked_softmax`` in megatron.core's dsa_masking)."""


def attention(costs: LayerCosts, chooses: bool = True) -> Part:
    """Return sparse attention, with an indexer if it ``chooses`` keys itself."""
    model, options, sizes = costs.job.model, costs.job.attention, costs.sizes
    core = _core(costs) + (_indexer(costs) if chooses else Part())
    if "core_attn" in costs.recomputed:
        core = core.recomputed(after_forward=0)
    value = model.num_attention_heads * options.v_head_dim
    whole = (
        costs.norm(is_recomputed=costs.recomputes_norms)
        + compression(costs)
        + _absorption(costs, is_trained=chooses and _is_trained(costs))
        + core
        + Part(after_forward=sizes.cut(value))
        + costs.products.row(value)
        + costs.dropped()
    )
    return costs.kernels.launched(whole, _SPARSE_KERNELS + (_INDEXING_KERNELS if chooses else 0))


def _is_fused(costs: LayerCosts) -> bool:
    return costs.job.attention.dsa_kernel_backend != "none"


def _is_trained(costs: LayerCosts) -> bool:
    """Whether the indexer is trained to choose the keys with the largest attention scores."""
    return costs.job.attention.dsa_indexer_loss_coeff > 0


def _key(costs: LayerCosts) -> int:
    return costs.job.attention.kv_lora_rank + costs.job.attention.qk_pos_emb_head_dim


def _absorption(costs: LayerCosts, is_trained: bool) -> Part:
    """Return the products that make queries as wide as compressed keys, which mla_up_proj recomputes."""
    model, options, sizes, products = costs.job.model, costs.job.attention, costs.sizes, costs.products
    heads, key = model.num_attention_heads, _key(costs)
    expanding = products.column(
        heads * (options.qk_head_dim + options.v_head_dim), read=options.kv_lora_rank, is_biased=False
    )
    absorbed = replace(
        expanding,
        weight_operations=0.0,
        activation_operations=expanding.weight_operations,
        input_gradient_seconds=expanding.backward_seconds,
        weight_gradient_seconds=0.0,
        overlapped_in_whole=0.0,
        gathering=0.0,
        first_gathering=0.0,
        after_input_gradient=0.0,
    )
    is_read_later = _is_fused(costs) or is_trained or "core_attn" in costs.recomputed
    # Otherwise attention reads copies in fp32, and in fp32 the queries themselves.
    saved_bytes = sizes.cut(heads * options.query_width)
    saved_bytes += sizes.cut(heads * key) if is_read_later or sizes.bytes == 4 else 0.0
    saved_bytes += sizes.whole(key) if is_read_later else 0.0
    product = (
        products.column(heads * options.query_width, read=options.q_lora_rank or None, is_biased=False)
        + absorbed
        + turned(costs, heads * (options.query_width + key))
        + Part(after_forward=saved_bytes)
    )
    inputs = sizes.spread(options.q_lora_rank)
    if "mla_up_proj" in costs.recomputed:
        product = product.recomputed(after_forward=0)
        inputs += sizes.whole(options.kv_lora_rank) if options.qk_layernorm or sizes.share > 1 else 0.0
    return product + Part(after_forward=inputs)


def _core(costs: LayerCosts) -> Part:
    """Return attention to the selected keys, and what it saves until its results are expanded to values."""
    model, options, sizes = costs.job.model, costs.job.attention, costs.sizes
    heads, length = model.num_attention_heads, model.seq_length
    pairs, top_k = sizes.tokens / sizes.share, min(length, options.dsa_indexer_topk)
    query, latent = heads * _key(costs), heads * options.kv_lora_rank
    operations = 2 * (query + latent) * pairs
    saved_bytes = sizes.cut(latent) + sizes.bytes * latent * options.v_head_dim / sizes.share
    if _is_fused(costs):
        width, seen = (_key(costs) + options.kv_lora_rank) / 2, met(top_k, length) / (2 * length)
        work = AttentionWork(operations * length, 0.0, True, length, width, seen)
        saved_bytes += 4 * sizes.tokens * top_k
    else:
        scores = pairs * length * heads
        work = AttentionWork(operations * length, 4 * scores, False, length, is_wide=True)
        # Queries and each head's own copy of the keys are converted to fp32.
        copies = 4 * pairs * query * (1 if sizes.bytes == 4 else 2)
        saved_bytes += copies + sizes.cut(latent) + scores * (_KEPT_OF_SCORES + sizes.bytes)
    forward, backward = costs.kernels.attention(work)
    gathering = costs.kernels.exchange(sizes.whole(_key(costs)))
    return Part(
        activation_operations=operations * met(top_k, length),
        forward_seconds=forward + gathering,
        input_gradient_seconds=backward + gathering,
        after_forward=saved_bytes,
    )


def _indexer(costs: LayerCosts) -> Part:
    """Return the indexer, which every tensor-parallel rank runs for all tokens.

    It takes no gradient to the layer.  Where it is trained, its loss compares it with the scores of attention
    over all keys, or those chosen, and a backward computes both scores again.
    """
    model, options, sizes, kernels = costs.job.model, costs.job.attention, costs.sizes, costs.kernels
    heads, width, length = options.dsa_indexer_n_heads, options.dsa_indexer_head_dim, model.seq_length
    compressed = options.q_lora_rank or sizes.hidden
    pairs = ((compressed, heads * width), (sizes.hidden, width), (sizes.hidden, heads))
    ranks = costs.job.parallel.sequence_ranks
    projected = sum(
        (costs.products.alone(*pair, is_biased=False) for pair in pairs), Part(parameters=2 * width)
    ).repeated(ranks)
    is_fused, is_wide = _is_fused(costs), not _is_fused(costs)
    operations = 2 * sizes.tokens * length * heads * width
    scored, scored_back = kernels.attention(
        AttentionWork(operations, 4 * sizes.tokens * length * heads, is_fused, length, width, is_wide=is_wide)
    )
    if not _is_trained(costs):
        return replace(
            projected,
            weight_operations=0.0,
            forward_seconds=projected.forward_seconds + scored,
            input_gradient_seconds=0.0,
            weight_gradient_seconds=0.0,
            after_input_gradient=0.0,
        )
    is_sparse = options.dsa_indexer_use_sparse_loss and is_fused
    compared = min(length, options.dsa_indexer_topk) if is_sparse else length
    query = model.num_attention_heads * _key(costs)
    target, _ = kernels.attention(
        AttentionWork(
            2 * query * sizes.tokens / sizes.share * length,
            4 * sizes.tokens / sizes.share * length * model.num_attention_heads,
            is_fused,
            length,
            width=_key(costs),
            seen=met(compared, length) / (2 * length),
            is_wide=is_wide,
        )
    )
    summed = 2 * kernels.gather(4 * sizes.tokens * length) if sizes.share > 1 else 0.0
    saved_bytes = sizes.whole(heads * width + 2 * width + 2 * heads)
    saved_bytes += (4 if is_fused else 8) * sizes.tokens * min(length, options.dsa_indexer_topk)
    read = sizes.whole(sizes.hidden + compressed)
    return replace(
        projected,
        activation_operations=operations,
        forward_seconds=projected.forward_seconds + scored + target + summed,
        input_gradient_seconds=scored + scored_back + target + summed,
        # Its inputs are the layer's own, or are gathered for it.
        after_forward=saved_bytes + (read if ranks > 1 else 0.0),
        after_input_gradient=projected.after_input_gradient
        - sizes.waiting * (sizes.whole(sizes.hidden) + (read if ranks == 1 else 0.0)),
    )
