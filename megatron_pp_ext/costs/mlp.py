"""The costs of a dense MLP, and of a layer of experts with its router and the shared expert."""

from dataclasses import replace

from megatron_pp_ext.costs.part import Matrices, Part
from megatron_pp_ext.costs.products import LayerCosts, matrix
from megatron_pp_ext.job.typed_job import Job


def activation(costs: LayerCosts, inner: int, copies: float = 1, is_expert: bool = False) -> Part:
    """Return the activation function of ``inner`` numbers a token, for ``copies`` times the tokens.

    Gates are those of arXiv 2002.05202.  A fused kernel reads the first product's result, writes the second
    one's input, and keeps its own input.  Operation by operation a gate keeps every factor, and a clamp its
    input too (``glu`` in megatron.core.transformer.mlp).  Products of experts may do all of it themselves
    (``Precision.fuses_experts``).  An expert's result is multiplied by the router's probabilities, in the
    same kernel or in one that keeps both factors.
    """
    model = costs.job.model
    width = copies * costs.sizes.cut(inner)
    if is_expert and costs.job.precision.fuses_experts:
        return Part(after_forward=(model.gates + costs.sizes.waiting) * width)
    is_fused = _is_fused(costs.job, is_expert)
    # Numbers that are read and written for each one of the result, in the forward and in the backward, and
    # those that are kept.
    forward, backward, saved_numbers = model.gates + 1, 2 * model.gates + 1, model.gates
    if model.gates == 2 and not is_fused:
        forward, backward, saved_numbers = forward + 4, backward + 6, saved_numbers + 2
    if _clamps(costs.job, is_fused):
        # Both halves are read and written, and joined again for a fused kernel.  The backward compares the
        # input with each bound, which makes masks of a byte, and chooses by them; then it joins both halves.
        # In one kernel's place there are copies of both, else of the gate.
        forward, backward = forward + (8 if is_fused else 4), backward + (15 if is_fused else 11)
        saved_numbers += 2 if is_fused else 1
    if is_expert and not is_fused:
        forward, backward, saved_numbers = forward + 2, backward + 3, saved_numbers + 1
    part = Part(
        forward_seconds=costs.kernels.copy(forward * width),
        input_gradient_seconds=costs.kernels.copy(backward * width),
        after_forward=(saved_numbers + costs.sizes.waiting) * width,
    )
    if is_expert and "moe_act" in costs.recomputed:
        return part.recomputed(after_forward=model.gates * width)
    return part


def _is_fused(job: Job, is_expert: bool) -> bool:
    """Whether one kernel computes all of it."""
    model, precision = job.model, job.precision
    if model.squared_relu:
        return is_expert and precision.use_fused_weighted_squared_relu
    if model.swiglu:
        return precision.bias_swiglu_fusion
    # For a dense MLP there is no such kernel with this gate, and for an expert none without a gate.
    return precision.bias_gelu_fusion and model.add_bias_linear and is_expert == model.quick_geglu


def _clamps(job: Job, is_fused: bool) -> bool:
    """Whether values are clamped: the kernel of --swiglu does not do so, and nothing does without a gate."""
    model = job.model
    return (
        model.activation_func_clamp_value is not None and model.gates == 2 and not (is_fused and model.swiglu)
    )


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


_BIASED, _UNBIASED = 14, 20
"""How often the results of experts are read or written for their biases, in the forward and in the backward,
where numbers in fp32 count twice.  Each bias is multiplied by probabilities, which are in fp32, and added;
the parts of all experts are joined, and the whole is converted.  The backward converts the gradient,
multiplies and sums it for the bias and for the probabilities, and joins the experts' inputs (``_apply_bias``
in megatron.core.transformer.moe.experts)."""


_LAUNCHED_CASTS = {"delayed": 0, "tensorwise": 2}
"""The kernels of the cast of one expert's tokens, by the recipe of FP8, or 1.

Transformer Engine starts the products and the casts of each expert one by one (``multi_stream_cublas_gemm``
in transformer_engine/common/gemm/cublaslt_gemm.cu, ``multi_tensor_quantize_impl`` in
transformer_engine/pytorch/csrc/extensions/cast.cpp, commit d0067d0d); delayed scales have one kernel for all,
and scales of the tensor itself one more to find them.  NVFP4 has two kernels for all experts, which transform
their tokens, find the scales and cast (``split_quantize_nvfp4_impl_with_rht_helper`` there)."""

_SLOW_CASTS = 4.5
"""The same in starts of a kernel with ``Precision.casts_experts_slowly``.

It is fitted to two steps of Qwen3-30B on 16 H100, in containers 25.11 and 26.02; those of later containers
take the two above (benchmarks/planner/found_errors.py)."""


def experts(costs: LayerCosts) -> Part:
    """Return a layer of experts and its norm.

    The router is taken to send every expert the same number of tokens.
    """
    model = costs.job.model
    local_experts = model.num_experts // costs.job.parallel.expert_model_parallel_size
    inside = router(costs) + _routed(costs, local_experts) + _latent(costs) + _shared_experts(costs)
    inside = inside.recomputed(after_forward=0) if "moe" in costs.recomputed else inside
    norm = costs.norm(is_recomputed=costs.recomputes_norms) + _read_by_router(costs)
    kernels = MLP_KERNELS * (2 if costs.job.precision.moe_grouped_gemm else 1 + local_experts)
    # The host waits for the number of tokens of every expert, so no launch of the router's is hidden.
    routing = costs.kernels.launched(Part(), ROUTER_KERNELS, has_routed=True)
    return routing + costs.kernels.launched(norm + inside + costs.dropped(), kernels, has_routed=True)


def routing(costs: LayerCosts) -> Part:
    """Return a layer of experts up to its router, with the norm and the shared expert."""
    norm = costs.norm(is_recomputed=costs.recomputes_norms) + _read_by_router(costs)
    return norm + router(costs) + _shared_experts(costs)


def _shared_experts(costs: LayerCosts) -> Part:
    if not costs.job.model.moe_shared_expert_intermediate_size:
        return Part()
    shared = _shared(costs)
    return shared.recomputed(after_forward=0) if "shared_experts" in costs.recomputed else shared


def _read_by_router(costs: LayerCosts) -> Part:
    """Return the router's own copy of the norm's output, needed where ``norm`` counts a quantized one.

    The router reads it in half precision, and dispatched tokens are quantized where the experts are.
    """
    if costs.recomputes_norms:
        return Part()
    shares = 1 if costs.job.model.moe_shared_expert_intermediate_size else 0
    more = 1 - costs.sizes.waiting * (1 - shares) if costs.sizes.waiting < 1 else 0
    return Part(after_forward=more * costs.hidden_bytes)


def _routed(costs: LayerCosts, local_experts: int) -> Part:
    """Return the ``local_experts`` of a rank, with the way of tokens to them and back."""
    model, parallel = costs.job.model, costs.job.parallel
    copies, inner, width = model.routed_copies, model.expert_width, model.expert_input
    into = costs.products.column(model.gates * inner, copies, local_experts, read=width)
    out = costs.products.row(inner, copies, local_experts, result=width)
    expert = into + activation(costs, inner, copies, is_expert=True) + out
    if costs.job.precision.fuses_experts:
        expert = expert.undivided
    expert = costs.kernels.launched(expert, _launches(costs, local_experts), has_routed=True)
    copies_bytes = copies * costs.sizes.spread(width)
    exchange = costs.kernels.shuffle(copies_bytes)
    # Tokens travel to the experts and back, and are put in order by rank and by expert before and after
    # either way: those of several experts where all that share them have gathered theirs.  A kernel reads a
    # token once for all of its copies that it writes, or writes the sum of those that it reads.
    token_bytes = costs.sizes.spread(width)
    ordered = copies_bytes * parallel.expert_tensor if local_experts > 1 else 0.0
    if parallel.moe_token_dispatcher_type == "flex":
        came = token_bytes * costs.kernels.reached(parallel.expert_model_parallel_size)
        ordered = (ordered + came) / 2 if ordered else 0.0
    else:
        ordered += (copies_bytes + token_bytes) / 2
    lent_seconds, hidden = _lent(costs, expert, exchange, [into, out])
    moving = 2 * exchange + costs.kernels.stream(4 * ordered)
    adds_biases = model.add_bias_linear and not costs.job.precision.fuses_experts
    biased = copies * costs.sizes.routed(width) if adds_biases else 0.0
    saved_bytes = expert.after_forward + costs.sizes.waiting * copies * costs.sizes.routed(width)
    if costs.job.precision.moe_paged_stash:
        # What is kept is copied into pages, and back.
        moving += costs.kernels.stream(2 * saved_bytes)
    return replace(
        expert,
        forward_seconds=expert.forward_seconds + moving + costs.kernels.copy(_BIASED * biased),
        input_gradient_seconds=expert.input_gradient_seconds
        + moving
        + costs.kernels.copy(_UNBIASED * biased),
        after_forward=saved_bytes,
        parameters=0.0,
        expert_parameters=expert.parameters * local_experts,
        fp8_parameters=expert.fp8_parameters * local_experts,
        matrices=expert.matrices
        and Matrices(0.0, 0.0, local_experts * expert.matrices.operations, expert.matrices.largest),
        exchanged_seconds=exchange,
        lent_seconds=lent_seconds,
        hidden_beside=hidden,
    )


def _lent(costs: LayerCosts, experts: Part, exchange: float, products: list[Part]) -> tuple[float, float]:
    """Return the seconds of expert W products that an I may run, and the exchange seconds that they hide.

    Each hides one of Megatron's all-to-all dispatcher; products of single experts are too short.
    """
    is_grouped = costs.job.precision.moe_grouped_gemm
    is_exchanged = costs.job.parallel.moe_token_dispatcher_type == "alltoall" and exchange > 0
    if not (is_grouped and is_exchanged and experts.weight_gradient_seconds):
        return 0.0, 0.0
    hidden = sum(min(exchange, product.weight_gradient_seconds) for product in products)
    return experts.weight_gradient_seconds, hidden


def _launches(costs: LayerCosts, local_experts: int) -> float:
    """Return the kernels that the forward of ``local_experts`` starts.

    The host waits for the numbers of their tokens before it starts any of them.
    """
    precision = costs.job.precision
    if not precision.moe_grouped_gemm or precision.fuses_experts:
        return MLP_KERNELS
    casts = 0.0
    if precision.uses_fp8 and not precision.fp4:
        casts = _LAUNCHED_CASTS.get(precision.fp8_recipe, 1)
        if precision.fp8_recipe == "tensorwise" and precision.casts_experts_slowly:
            casts = _SLOW_CASTS
    return MLP_KERNELS + 2 * local_experts * (1 + casts)


def _latent(costs: LayerCosts) -> Part:
    """Return the projections of every token to the experts' width and back, if it is another.

    Experts may work in a latent width (LatentMoE, as in NVIDIA's Nemotron 3).
    """
    model = costs.job.model
    if not model.moe_latent_size:
        return Part()
    down = costs.products.alone(model.hidden_size, model.moe_latent_size)
    up = costs.products.alone(model.moe_latent_size, model.hidden_size)
    # The input of the first is what the norm made, that of the second is kept.
    input_bytes = costs.sizes.waiting * costs.sizes.spread(model.moe_latent_size)
    return down + up + Part(after_forward=input_bytes)


def _shared(costs: LayerCosts) -> Part:
    """Return the shared expert, which is dense, and the gate that multiplies its output."""
    model = costs.job.model
    shared = feed_forward(costs, model.moe_shared_expert_intermediate_size)
    if not model.moe_shared_expert_gate:
        return shared
    hidden = costs.hidden_bytes
    # The gate is a product with one column: it reads the input.  Then the output is read and written.
    return shared + Part(
        activation_operations=2 * hidden / costs.sizes.bytes,
        forward_seconds=costs.kernels.copy(3 * hidden),
        input_gradient_seconds=costs.kernels.copy(6 * hidden),
        after_forward=hidden,
        parameters=model.hidden_size,
    )
