"""The activation function between the products of an MLP or an expert, alone or with a gate.

Gates are those of arXiv 2002.05202.  A fused kernel reads the first product's result, writes the second
one's input, and keeps its own input.  Operation by operation a gate keeps every factor, and a clamp its input
too (``glu`` in megatron.core.transformer.mlp).  Products of experts may do all of it themselves
(``Precision.fuses_experts``).  An expert's result is multiplied by the router's
probabilities, in the same kernel or in one that keeps both factors.
"""

from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.job.typed_job import Job


def activation(costs: LayerCosts, inner: int, copies: float = 1, is_expert: bool = False) -> Part:
    """Return the activation function of ``inner`` numbers a token, for ``copies`` times the tokens."""
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
