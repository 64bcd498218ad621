"""A layer of experts with its norm, its router, and the shared expert if there is one.

Experts may work in a latent width, to which and from which every token is projected outside of them
(LatentMoE, as in NVIDIA's Nemotron 3).
"""

from dataclasses import replace

from megatron_pp_ext.costs.activation_function import activation
from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.mlp import MLP_KERNELS, feed_forward
from megatron_pp_ext.costs.part import Matrices, Part
from megatron_pp_ext.costs.router import ROUTER_KERNELS, router

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
and scales of the tensor itself one more to find them."""


def experts(costs: LayerCosts) -> Part:
    """Return a layer of experts and its norm.

    The router is taken to send every expert the same number of tokens.
    """
    model = costs.job.model
    local_experts = model.num_experts // costs.job.parallel.expert_model_parallel_size
    inside = router(costs) + _routed(costs, local_experts) + _latent(costs)
    if model.moe_shared_expert_intermediate_size:
        shared = _shared(costs)
        inside += shared.recomputed(after_forward=0) if "shared_experts" in costs.recomputed else shared
    inside = inside.recomputed(after_forward=0) if "moe" in costs.recomputed else inside
    norm = costs.norm(is_recomputed=costs.recomputes_norms) + _read_by_router(costs)
    kernels = MLP_KERNELS * (2 if costs.job.precision.moe_grouped_gemm else 1 + local_experts)
    # The host waits for the number of tokens of every expert, so no launch of the router's is hidden.
    routing = costs.kernels.launched(Part(), ROUTER_KERNELS, has_routed=True)
    return routing + costs.kernels.launched(norm + inside + costs.dropped(), kernels, has_routed=True)


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


def _launches(costs: LayerCosts, local_experts: int) -> int:
    """Return the kernels that the forward of ``local_experts`` starts.

    The host waits for the numbers of their tokens before it starts any of them.
    """
    precision = costs.job.precision
    if not precision.moe_grouped_gemm or precision.fuses_experts:
        return MLP_KERNELS
    casts = 0
    if precision.uses_fp8:
        casts = 2 if precision.fp4 else _LAUNCHED_CASTS.get(precision.fp8_recipe, 1)
    return MLP_KERNELS + 2 * local_experts * (1 + casts)


def _latent(costs: LayerCosts) -> Part:
    """Return the projections of every token to the experts' width and back, if it is another."""
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
