"""Multi-latent attention: queries, keys and values come from compressed ones (arXiv 2405.04434, section 2.1).

Every tensor-parallel rank has the weights that compress whole, but for Megatron's local layers and under
--mla-down-proj-fusion, which divide them and gather the results.  Fused kernels attend as fast as with equal
heads of the mean width of keys and values: TensorRT-LLM's forward with heads of 192 and 128 on an H100 is
compared in benchmarks/results/components.md.  YaRN (arXiv 2309.00071) changes only the angles.
"""

from megatron_pp_ext.costs.core_attention import core, norm_weights, output, turned
from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.part import Part

_LATENT_KERNELS = 22
"""The kernels that a forward starts; see ``mlp.MLP_KERNELS``."""


def attention(costs: LayerCosts, window: int | None = None) -> Part:
    """Return multi-latent attention in which a token sees ``window`` tokens, or all of them."""
    model, latent = costs.job.model, costs.job.attention
    query = model.num_attention_heads * latent.query_width
    value = model.num_attention_heads * latent.v_head_dim
    whole = (
        costs.norm(is_recomputed=None if latent.compresses_at_once else costs.recomputes_norms)
        + compression(costs)
        + _expansion(costs, query, value)
        + core(costs, query, value, query + value, window or model.seq_length)
        + output(costs, value)
        + costs.products.row(value)
        + costs.dropped()
    )
    return costs.kernels.launched(whole, _LATENT_KERNELS)


def compression(costs: LayerCosts) -> Part:
    """Return the products that compress queries, if they are, and keys and values, and the norms after."""
    latent, sizes, products = costs.job.attention, costs.sizes, costs.products
    queries, keys_and_values = latent.q_lora_rank, latent.kv_lora_rank + latent.qk_pos_emb_head_dim
    is_joined = latent.compresses_at_once
    widths = (
        [queries + keys_and_values] if is_joined else [width for width in (queries, keys_and_values) if width]
    )
    if is_joined or costs.job.precision.transformer_impl == "local":
        gathering = costs.kernels.gather(sizes.whole(queries + keys_and_values)) if sizes.share > 1 else 0.0
        product = sum(
            (products.column(width, is_biased=False) for width in widths), Part(forward_seconds=gathering)
        )
    else:
        product = sum((products.alone(sizes.hidden, width, is_biased=False) for width in widths), Part())
    # Two products read the hidden state, one of them perhaps to make queries; it waits for W once, unless the
    # one is after a norm of its own, or gathers it and keeps its part of that.
    is_read_twice = not (is_joined or latent.norms_hidden or (products.keeps_copies and not queries))
    normed = (queries or sizes.hidden) + latent.kv_lora_rank if latent.qk_layernorm else 0
    seconds = costs.kernels.copy(2 * sizes.spread(normed))
    return product + Part(
        forward_seconds=seconds,
        input_gradient_seconds=seconds,
        after_forward=sizes.spread(keys_and_values + (queries if latent.qk_layernorm else 0)),
        after_input_gradient=-sizes.waiting * sizes.hidden_bytes if is_read_twice else 0.0,
        parameters=norm_weights(costs, normed),
    )


def _expansion(costs: LayerCosts, query: int, value: int) -> Part:
    """Return the products that make queries, keys and values, which mla_up_proj recomputes.

    Transformer Engine's products include the norms before them, also where queries are not compressed.  The
    part of a key with the positions is one for all heads, and copied to each.
    """
    latent, sizes, products = costs.job.attention, costs.sizes, costs.products
    expanded = costs.job.model.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
    read = latent.q_lora_rank + (latent.kv_lora_rank if latent.qk_layernorm else 0)
    read += sizes.hidden if latent.norms_hidden else 0
    inputs = Part(after_forward=sizes.waiting * sizes.spread(read))
    product = (
        products.column(query, read=latent.q_lora_rank or None, is_biased=False)
        + products.column(expanded, read=latent.kv_lora_rank, is_biased=False)
        + turned(costs, 2 * query + value)
        + Part(after_forward=sizes.cut(2 * query + value))
    )
    if "mla_up_proj" not in costs.recomputed:
        return product + inputs
    if latent.qk_layernorm and costs.job.precision.transformer_impl != "local":
        return (product + inputs).recomputed(after_forward=0)
    return product.recomputed(after_forward=0) + inputs
