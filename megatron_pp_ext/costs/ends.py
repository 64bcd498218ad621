"""The costs of stages besides layers: embedding, output layer with the loss, MTP, and lasting buffers."""

from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.products import LayerCosts, matrix


def table(costs: LayerCosts, vocabulary: int) -> Part:
    """Return the rows of the embedding; a look-up is not counted."""
    return Part(parameters=vocabulary * costs.sizes.hidden / costs.sizes.share)


def positions(costs: LayerCosts) -> Part:
    """Return the weights of learned positions, and the mask of the dropout after the embedding.

    Muon takes them for a matrix of a layer (``_is_nonlinear_or_embedding`` in emerging_optimizers).
    """
    is_learned = costs.job.model.position_embedding_type == "learned_absolute"
    rows = costs.job.model.max_position_embeddings if is_learned else 0
    width = costs.sizes.hidden
    return costs.dropped() + Part(parameters=rows * width) + matrix(costs.job.memory, rows, width)


def output(costs: LayerCosts, vocabulary: int) -> Part:
    """Return the output layer and the loss, which keeps probabilities in fp32.

    Transformer Engine's loss instead leaves the gradient in the place of the logits.
    """
    probabilities = 4 * costs.sizes.tokens * vocabulary / costs.sizes.share
    precision = costs.job.precision
    if precision.has_loss_in_place:
        # Logits are read for their maximum and sum, and once more for the gradient, which is written over
        # them and scaled in the backward (transformer_engine.common.triton.cross_entropy).
        logits = costs.sizes.bytes / 4 * probabilities
        forward, backward, saved_bytes = 3 * logits, 2 * logits, logits
    elif precision.cross_entropy_loss_fusion:
        # A kernel converts logits to fp32 and finds their maximum, another one makes and sums the
        # exponentials, and the last divides (megatron.core.fusions.fused_cross_entropy).
        forward, backward, saved_bytes = 5.5 * probabilities, 3.5 * probabilities, probabilities
    else:
        # Logits are converted to fp32, read for their maximum, and once more for their sum; the maximum is
        # subtracted, the exponential taken, and the sum divided by in place.  The gradient is scaled in
        # place and converted back (megatron.core.tensor_parallel.cross_entropy).
        forward, backward, saved_bytes = 8.5 * probabilities, 3.5 * probabilities, probabilities
    loss = Part(
        forward_seconds=costs.kernels.copy(forward),
        input_gradient_seconds=costs.kernels.copy(backward),
        after_forward=saved_bytes,
    )
    return costs.products.output(vocabulary) + loss


def loss_workspace(costs: LayerCosts, vocabulary: int) -> float:
    """Return the temporary bytes of the loss.

    Megatron's loss converts logits to fp32, and computes the probabilities that it keeps in their place;
    the product's own logits exist at the same time, and so does their gradient in the backward.  Logits that
    are in fp32 are not converted (megatron.core.tensor_parallel.cross_entropy).  Compiled functions write
    probabilities to new tensors and keep the fp32 logits (megatron.core.fusions.fused_cross_entropy).
    Transformer Engine's loss before 2.18 keeps the logits alone.
    """
    precision = costs.job.precision
    if precision.has_loss_in_place:
        return 0.0
    logits = costs.sizes.bytes if precision.is_half else 0
    compiled = 4 if precision.cross_entropy_loss_fusion else 0
    return (logits + compiled) * costs.sizes.tokens * vocabulary / costs.sizes.share


def split_workspace(costs: LayerCosts, vocabulary: int) -> float:
    """Return the temporary bytes of a head that ranks split, on all of them together.

    T makes the gradient of the logits in fp32, and converts it to the weight's precision
    (``features.vocabulary.runtime.output``).
    """
    converted = costs.sizes.bytes if costs.job.precision.is_half else 0
    return (4 + converted) * costs.sizes.tokens * vocabulary / costs.sizes.share


def prediction(costs: LayerCosts) -> Part:
    """Return the parts of an MTP depth around its layers.

    Embedding and hidden state, each with a norm, are joined and projected to the hidden size
    (arXiv 2412.19437, section 2.2).  The norm after the layers is a part of the head but for its weights.
    """
    sizes, kernels = costs.sizes, costs.kernels
    hidden = sizes.hidden
    # All ranks get the projection whole, and under sequence parallelism keep a part of the tokens of it.
    gathering = kernels.gather(sizes.whole(hidden)) if sizes.share > 1 else 0.0
    again = gathering if costs.job.parallel.sequence_parallel else 0.0
    # The norms read and write, and both results are copied into one.
    copying = kernels.copy(8 * sizes.hidden_bytes)
    return costs.products.column(hidden, read=2 * hidden, is_biased=False) + Part(
        forward_seconds=copying + gathering,
        input_gradient_seconds=copying + again,
        after_forward=(2 + 2 * sizes.waiting) * sizes.hidden_bytes,
        parameters=3 * costs.norm().parameters,
    )


_WORKSPACE = 32 * 2**20
"""The bytes of a workspace of cuBLAS from compute capability 9.0 on, in Transformer Engine
(``get_cublas_workspace_size_bytes`` in pytorch/cpp_extensions/gemm.py) and in PyTorch
(aten/src/ATen/cuda/CublasHandlePool.cpp)."""

_STREAMS = 4
"""The streams on which Transformer Engine starts products of experts, each with a workspace of its own."""


def of_layers(costs: LayerCosts) -> float:
    """Return the bytes of the workspaces of products and of the placeholders of layers' weights.

    Shapes are those of the whole model: a rank whose layers have fewer of them has a little less.
    """
    precision = costs.job.precision
    workspaces = 1
    if precision.transformer_impl != "local":
        is_grouped = costs.job.model.num_experts and precision.moe_grouped_gemm
        workspaces += 1 + (_STREAMS if is_grouped else 0)
    weights = sum(rows * columns for rows, columns in costs.products.shapes)
    return workspaces * _WORKSPACE + (costs.sizes.bytes * weights if _has_placeholders(costs) else 0.0)


def of_output(costs: LayerCosts, vocabulary: int) -> float:
    """Return the bytes of the placeholder of the output layer's weight, which Megatron's own layers take."""
    weight = costs.sizes.bytes * vocabulary * costs.sizes.hidden / costs.sizes.share
    return weight if _has_placeholders(costs) else 0.0


def of_gathers(costs: LayerCosts) -> float:
    """Return the bytes of gathered operands: one for the present W product and two on their way."""
    return 3 * costs.products.largest_gathered


def gathered(costs: LayerCosts) -> float:
    """Return the bytes of the buffer for the output layer's input, gathered under sequence parallelism.

    ``get_global_memory_buffer`` in megatron.core.tensor_parallel.layers.
    """
    is_cut = costs.sizes.share > 1 and costs.job.parallel.sequence_parallel
    return costs.sizes.whole(costs.sizes.hidden) if is_cut else 0.0


def _has_placeholders(costs: LayerCosts) -> bool:
    """Whether weights have placeholders: one tensor for each shape, in the weight's precision, which
    Transformer Engine hands to autograd as the gradient where products add gradients to Megatron's buffers
    (``get_dummy_wgrad`` in transformer_engine/pytorch/module/base.py, from release 2.4 on).
    """
    precision = costs.job.precision
    return precision.gradient_accumulation_fusion and precision.transformer_impl != "local"
