"""Tensors that libraries make once and keep for all microbatches and layers, so that every peak has them.

Transformer Engine hands autograd a placeholder as the gradient of a weight where products add gradients to
Megatron's buffers: one tensor for each shape of a weight, in the weight's precision (``get_dummy_wgrad`` in
transformer_engine/pytorch/module/base.py, from release 2.4 on).
"""

from megatron_pp_ext.costs.layer_costs import LayerCosts

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
    precision = costs.job.precision
    return precision.gradient_accumulation_fusion and precision.transformer_impl != "local"
