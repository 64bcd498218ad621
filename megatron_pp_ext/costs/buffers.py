"""Tensors that libraries make once and keep for all microbatches and layers, so that every peak has them."""

from megatron_pp_ext.costs.layer_costs import LayerCosts


def placeholders(costs: LayerCosts) -> float:
    """Return the bytes of the tensors that Transformer Engine hands to autograd as gradients of weights.

    Where products add gradients to Megatron's buffers, autograd still wants a gradient, so that hooks run.  There
    is one tensor for each shape of a weight, in the weight's precision (``get_dummy_wgrad`` in
    transformer_engine/pytorch/module/base.py, from release 2.4 on).  Shapes are those of the whole model: a rank
    whose layers have fewer of them has a little less.
    """
    if not _has_placeholders(costs):
        return 0.0
    return costs.sizes.bytes * sum(rows * columns for rows, columns in costs.products.shapes)


def of_output(costs: LayerCosts, vocabulary: int) -> float:
    """Return the bytes that the output layer of ``vocabulary`` rows keeps for all microbatches.

    Megatron's layers gather their input into one buffer under sequence parallelism (``get_global_memory_buffer``
    in megatron.core.tensor_parallel.layers), and take the same placeholders as Transformer Engine's.
    """
    sizes = costs.sizes
    gathered = sizes.whole(sizes.hidden) if sizes.share > 1 and costs.job.parallel.sequence_parallel else 0.0
    weight = sizes.bytes * vocabulary * sizes.hidden / sizes.share
    return gathered + (weight if _has_placeholders(costs) else 0.0)


def _has_placeholders(costs: LayerCosts) -> bool:
    precision = costs.job.precision
    return precision.gradient_accumulation_fusion and precision.transformer_impl != "local"
