"""The costs of attention, a section for each kind: self-attention, latent and sparse, gated delta nets.

Operations are those of whole sequences, as of arXiv 2401.10241, table 3: the causal mask hides half of them.
A sliding window (arXiv 2004.05150, section 3.1) hides more, and is counted in the same way.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd

from megatron_pp_ext.costs.kernels import AttentionWork
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.products import LayerCosts


def core(costs: LayerCosts, query: float, value: float, around: float, window: int) -> Part:
    """Return attention with queries of a width of ``query`` and values of ``value``, in all heads together.

    A token sees ``window`` tokens at most.  Meanwhile the keys and values of other context-parallel ranks,
    which have a width of ``around``, arrive; of slices the ranks exchange heads for tokens before and after.
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
            length / (1 if exchanges_heads(costs) else costs.job.parallel.context_parallel_size),
            width=(query + value) / 2 / model.num_attention_heads,
            # Unfused attention computes all scores, and then hides them.
            seen=met(window if is_fused else length, length) / (2 * length),
        )
    )
    if exchanges_heads(costs):
        exchange = _exchange(costs, query + around * copies_of_keys(costs), value)
        forward, backward = forward + exchange, backward + exchange
    else:
        results, gradients = pairs * value, pairs * (query + around)
        forward = kernels.ring(forward, sizes.cut(around), results)
        backward = kernels.ring(backward, 2 * sizes.cut(around), gradients)
    part = Part(
        activation_operations=widths * pairs * met(window, length),
        forward_seconds=forward,
        input_gradient_seconds=backward,
        after_forward=0.0 if is_fused else _kept_scores(costs, scores),
        parameters=model.num_attention_heads / sizes.share if sinks == "learnable" else 0.0,
    )
    return part.recomputed(after_forward=0) if "core_attn" in costs.recomputed else part


def exchanges_heads(costs: LayerCosts) -> bool:
    """Whether context-parallel ranks exchange heads for tokens, as they do for slices of sequences."""
    job = costs.job
    return job.parallel.context_parallel_size > 1 and isinstance(job.pipeline.pipeline_slice_tokens, int)


def copies_of_keys(costs: LayerCosts) -> int:
    """Return how often keys and values are repeated, so that such an exchange gives each rank some."""
    job = costs.job
    if not exchanges_heads(costs) or job.attention.multi_latent_attention:
        return 1
    heads = max(1, job.model.key_heads // job.parallel.tensor_model_parallel_size)
    return job.parallel.context_parallel_size // gcd(heads, job.parallel.context_parallel_size)


def _exchange(costs: LayerCosts, inputs: float, result: float) -> float:
    """Return the seconds of both exchanges, each with a copy of what is sent and of what comes.

    The result is received and sent as it lies in memory once each.
    """
    inputs, result = costs.sizes.cut(inputs), costs.sizes.cut(result)
    sent = costs.kernels.exchange(inputs) + costs.kernels.exchange(result)
    return sent + costs.kernels.copy(4 * inputs + 2 * result)


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


_FUSED_KERNELS, _UNFUSED_KERNELS = 11, 16
"""The kernels that a forward starts; see ``mlp.MLP_KERNELS``."""

_ROTARY = ("rope", "yarn", "mrope")

_FP32 = 4
"""The bytes of a number in fp32."""


def self_attention(costs: LayerCosts, window: int | None = None) -> Part:
    """Return self-attention in which a token sees ``window`` tokens, or all of them.

    Models may also have norms of queries and keys (arXiv 2302.05442, section 2), a gate of the output (arXiv
    2505.06708), and sinks (arXiv 2508.10925, section 2.2), which ``core`` counts.
    """
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
        + _in_slices(costs, 2 * keys * copies_of_keys(costs), *_kept_in_slices(costs, query, keys, projected))
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
        return query + 2 * keys * copies_of_keys(costs)
    has_norms = options.qk_layernorm or options.qk_l2_norm
    is_new = has_norms or model.position_embedding_type in _ROTARY
    if keys == query:
        return projected + (query + keys if is_new else 0)
    if "core_attn" in costs.recomputed:
        return query + (keys if is_new else 0) + (0 if has_norms else projected)
    return 3 * query


def _in_slices(costs: LayerCosts, width: int, replaced: int, expanded: int = 0) -> Part:
    """Return the bytes of slices whose keys and values together have this ``width`` (``SequenceMemory``).

    Sums of gradients are in fp32.  Unfused attention makes a mask of a byte for each score of all heads.
    """
    sizes = costs.sizes
    stored = sizes.cut(width)
    return Part(
        masks=float(costs.job.precision.is_unfused and "core_attn" not in costs.recomputed),
        stored=stored,
        owed=stored * max(_FP32, sizes.bytes) / sizes.bytes,
        replaced=sizes.cut(replaced),
        expanded=sizes.cut(expanded),
    )


def _kept_in_slices(costs: LayerCosts, query: int, keys: int, projected: int) -> tuple[int, int]:
    """Return the width of what slices do not keep of ``_kept``, and of what they keep up to their end.

    Where attention is computed again, its inputs are kept besides the stored keys and values.  Queries that
    are no copies hold what was projected, and so do norms.
    """
    options = costs.job.attention
    if "core_attn" in costs.recomputed:
        return 0, 0
    if not costs.job.precision.is_unfused:
        return 2 * keys * copies_of_keys(costs), 0
    if keys != query:
        return 2 * query, 2 * query
    if options.qk_layernorm or options.qk_l2_norm:
        return keys, 0
    is_rotary = costs.job.model.position_embedding_type in _ROTARY
    return (projected + keys if is_rotary else 0), 0


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


_LATENT_KERNELS = 22
"""The kernels that a forward starts; see ``mlp.MLP_KERNELS``."""


def latent_attention(costs: LayerCosts, window: int | None = None) -> Part:
    """Return multi-latent attention in which a token sees ``window`` tokens, or all of them.

    Every tensor-parallel rank has the weights that compress whole, but for Megatron's local layers and under
    --mla-down-proj-fusion, which divide them and gather the results.  Fused kernels attend as fast as with
    equal heads of the mean width of keys and values: TensorRT-LLM's forward with heads of 192 and 128 on an
    H100 is compared in benchmarks/results/components.md.  YaRN (arXiv 2309.00071) changes only the angles.
    """
    model, latent = costs.job.model, costs.job.attention
    query = model.num_attention_heads * latent.query_width
    value = model.num_attention_heads * latent.v_head_dim
    is_computed_again = bool({"core_attn", "mla_up_proj"} & set(costs.recomputed))
    whole = (
        costs.norm(is_recomputed=None if latent.compresses_at_once else costs.recomputes_norms)
        + compression(costs)
        + _expansion(costs, query, value)
        + core(costs, query, value, query + value, window or model.seq_length)
        + _in_slices(costs, query + value, 0 if is_computed_again else query + value)
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


_CHUNK = 64

_DELTA_KERNELS = 28
"""The kernels that a forward starts; see ``mlp.MLP_KERNELS``."""


def gated_delta_net(costs: LayerCosts) -> Part:
    """Return a gated delta net and its norm; its products have no biases.

    The rule goes by chunks of 64 tokens: inside a chunk everything is a product of matrices, and between
    chunks one state for each head is passed on.  Saved are the operands of flash-linear-attention's kernels
    and, for each token, a row of the inverse of its chunk's matrix (``ChunkGatedDeltaRuleFunction``, fla-core
    0.6.0).
    """
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


_SPARSE_KERNELS, _INDEXING_KERNELS = 30, 25
"""The kernels that a forward starts; see ``mlp.MLP_KERNELS``."""

_KEPT_OF_SCORES = 4 + 4 + 3
"""The bytes of each score that softmax in single operations keeps besides its result: its exponential, its
quotient, and three masks (``masked_softmax`` in megatron.core's dsa_masking)."""


def sparse_attention(costs: LayerCosts, chooses: bool = True) -> Part:
    """Return sparse attention, with an indexer if it ``chooses`` keys itself.

    Queries attend to compressed keys and values, whose expansion is absorbed into queries and results (arXiv
    2405.04434, appendix C), so that the product with its weight is one of activations, and waits for no W.
    Without --dsa-kernel-backend all scores are computed, in fp32, and kept.  With one, kernels are taken to
    reach the rate of fused attention over as many tokens as are chosen (FlashMLA's README has 640 TFLOP/s for
    such a forward on an H800).
    """
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


KINDS: Mapping[str, Callable[..., Part]] = {
    "*": self_attention,
    "+": latent_attention,
    "D": sparse_attention,
    "G": gated_delta_net,
}
"""The kinds of attention by their letters in --hybrid-layer-pattern."""


class Attentions:
    """The attention of the layers of a model; equal ones are one object."""

    def __init__(self, costs: LayerCosts) -> None:
        self._costs = costs
        self._made: dict[tuple[str | int, ...], Part] = {}

    def layer(self, number: int, letter: str | None = None) -> Part:
        """Return the attention of layer ``number``, counted from 1.

        Its kind is ``letter``, or the model's for this layer.
        """
        attention = self._costs.job.attention
        kind = letter or attention.letter(number)
        if kind == "G":
            return self._once(kind)
        if kind == "D":
            return self._once(kind, attention.chooses(number))
        return self._once(kind, attention.window(number, self._costs.job.model.seq_length))

    def _once(self, kind: str, *how: int) -> Part:
        if (kind, *how) not in self._made:
            self._made[kind, *how] = KINDS[kind](self._costs, *how)
        return self._made[kind, *how]
