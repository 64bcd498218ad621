"""What stages have beside layers: the embedding, the output layer with the loss, multi-token prediction."""

from dataclasses import replace

from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.part import Part


def table(costs: LayerCosts, vocabulary: int) -> Part:
    """Return the rows of the embedding; a look-up is not counted."""
    return Part(parameters=vocabulary * costs.sizes.hidden / costs.sizes.share)


def positions(costs: LayerCosts) -> Part:
    """Return the weights of learned positions, and the mask of the dropout behind the embedding."""
    is_learned = costs.job.model.position_embedding_type == "learned_absolute"
    rows = costs.job.model.max_position_embeddings if is_learned else 0
    return costs.dropped() + Part(parameters=rows * costs.sizes.hidden)


def output(costs: LayerCosts, vocabulary: int) -> Part:
    """Return the output layer and the loss, which keeps probabilities in fp32."""
    probabilities = 4 * costs.sizes.tokens * vocabulary / costs.sizes.share
    # Logits are converted to fp32, read for their maximum, and once more for their sum; the maximum is
    # subtracted, the exponential taken, and the sum divided by in place.  The gradient is scaled in place and
    # converted back (megatron.core.tensor_parallel.cross_entropy).
    loss = Part(
        forward_seconds=costs.kernels.copy(8.5 * probabilities),
        input_gradient_seconds=costs.kernels.copy(3.5 * probabilities),
        after_forward=probabilities,
    )
    return costs.products.output(vocabulary) + loss


def loss_workspace(costs: LayerCosts, vocabulary: int) -> float:
    """Return the temporary bytes of the loss: logits as the product makes them, and a copy in fp32."""
    return (costs.sizes.bytes + 4) * costs.sizes.tokens * vocabulary / costs.sizes.share


def prediction(costs: LayerCosts) -> Part:
    """Return the projection of embedding and hidden state in one depth of multi-token prediction."""
    kept = costs.hidden_bytes
    joined = costs.products.column(costs.sizes.hidden).times(2)
    return replace(joined, after_forward=4 * kept, after_input_gradient=3 * kept * costs.sizes.waiting)
