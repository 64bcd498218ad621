"""A layer of experts with its norm."""

from dataclasses import replace

from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.mlp import MLP_KERNELS, feed_forward
from megatron_pp_ext.costs.part import Part

_ROUTER_KERNELS = 25
"""The kernels of routing and ordering tokens; see ``mlp.MLP_KERNELS``."""


def experts(costs: LayerCosts) -> Part:
    """Return a layer of experts, with the shared one if there is one, and its norm.

    The router is taken to send every expert the same number of tokens; its own product is left out.
    """
    model = costs.job.model
    chosen, inner = model.moe_router_topk, model.expert_width
    here = model.num_experts // costs.job.parallel.expert_model_parallel_size
    inside = _routed(costs, feed_forward(costs, inner, copies=chosen, experts=here))
    if model.gates == 1:
        # The activation before it is scaled by the router's probabilities.
        inside += Part(after_forward=costs.sizes.cut(chosen * inner))
    if "moe_act" in costs.recomputed:
        inside = inside.recomputed(kept=inside.after_forward - costs.sizes.cut(chosen * inner))
    if model.moe_shared_expert_intermediate_size:
        shared = feed_forward(costs, model.moe_shared_expert_intermediate_size)
        inside += shared.recomputed(kept=0) if "shared_experts" in costs.recomputed else shared
    inside = inside.recomputed(kept=0) if "moe" in costs.recomputed else inside
    kernels = MLP_KERNELS * (2 if costs.job.precision.moe_grouped_gemm else 1 + here)
    # The host waits for the number of tokens of every expert, so no launch of the router's is hidden.
    routing = costs.kernels.launched(Part(), _ROUTER_KERNELS)
    return routing + costs.kernels.launched(costs.norm() + inside + costs.dropped(), kernels)


def _routed(costs: LayerCosts, one: Part) -> Part:
    """Return the MLP ``one`` as a rank's experts: with the routing, and the weights of each expert."""
    model, parallel = costs.job.model, costs.job.parallel
    sent = model.moe_router_topk * costs.hidden_bytes
    # Tokens travel to the experts and back, and are put in order before and after either way.
    exchange = costs.kernels.shuffle(sent)
    moving = 2 * exchange + costs.kernels.copy(8 * sent)
    here = model.num_experts / parallel.expert_model_parallel_size
    share = costs.sizes.share / parallel.expert_tensor
    return replace(
        one,
        forward_seconds=one.forward_seconds + moving,
        input_gradient_seconds=one.input_gradient_seconds + moving,
        after_forward=one.after_forward + sent,
        parameters=0.0,
        expert_parameters=one.parameters * share * here,
        fp8_parameters=one.fp8_parameters * share * here,
        exchanged_seconds=exchange,
    )
