"""A Mamba-2 layer (arXiv 2405.21060): a convolution and a scan between two products, with its norms.

The scan goes by chunks of 128 tokens, as Megatron has it (section 6 of the paper): inside a chunk everything
is a product of matrices, and between chunks states are passed on.  The saved tensors are the inputs of the
convolution and the scan's result before its gate, from which the kernel computes all else again
(``mamba_split_conv1d_scan_combined`` of mamba_ssm).
"""

from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.products import LayerCosts

_CHUNK, _TAPS = 128, 4
"""The tokens of a chunk, and of the convolution's window (``MambaMixer`` in megatron.core.ssm)."""

CONVOLVED = 1.23
"""What the convolution takes for each second of copying what it reads and writes.

On an H100 it reaches 0.73 of the rate of device memory, where large copies reach 0.9
(ai-dynamo/aiconfigurator, commit 095f58a51, linear_attention/trtllm 1.3.0rc20)."""

_MAMBA_KERNELS = 14
"""The kernels that a forward starts; see ``mlp.MLP_KERNELS``."""


def mamba(costs: LayerCosts) -> Part:
    """Return a Mamba-2 layer and its norm; its products have no biases."""
    model, sizes = costs.job.model, costs.sizes
    inner = model.mamba_heads * model.mamba_head_dim
    states = model.mamba_num_groups * model.mamba_state_dim
    projected = 2 * inner + 2 * states + model.mamba_heads
    # The norm after the scan keeps its input, and the product after it keeps its own.
    saved_bytes = sizes.cut(projected) + (2 + sizes.waiting) * sizes.cut(inner)
    convolved = inner + 2 * states
    parameters = convolved * (_TAPS + 1) + 3 * model.mamba_heads + inner
    whole = (
        costs.norm(is_recomputed=False)
        + costs.products.column(projected, is_biased=False, is_normed=True)
        + _scan(costs, inner, states, projected)
        + Part(after_forward=saved_bytes, parameters=parameters / sizes.share)
        + costs.products.row(inner, is_biased=False)
        + costs.dropped()
    )
    return costs.kernels.launched(whole, _MAMBA_KERNELS)


def _scan(costs: LayerCosts, inner: int, states: int, projected: int) -> Part:
    """Return convolution, scan, and norm, and the exchange of tokens for heads before and after them.

    Context-parallel ranks have all tokens of some heads meanwhile.
    """
    model, sizes = costs.job.model, costs.sizes
    numbers = sizes.tokens / sizes.share
    # For each token: its products with the others of its chunk, by group and by head, and those with states.
    operations = 2 * numbers * (_CHUNK * (states + inner) + 2 * inner * model.mamba_state_dim)
    operations += 2 * numbers * _TAPS * (inner + 2 * states)
    # A state of each chunk is written, passed on, and read, and so are the products by group; all in fp32.
    passed = 4 * numbers * inner * model.mamba_state_dim / _CHUNK
    scores = 4 * numbers * model.mamba_num_groups * _CHUNK
    touched = sizes.cut(projected + inner) + 4 * passed + 2 * scores
    forward, backward = costs.kernels.scan(operations, touched)
    convolved = costs.kernels.copy(CONVOLVED * sizes.cut(2 * (inner + 2 * states)) + sizes.cut(2 * inner))
    exchanged = costs.kernels.exchange(sizes.cut(projected)) + costs.kernels.exchange(sizes.cut(inner))
    return Part(
        activation_operations=operations,
        forward_seconds=forward + convolved + exchanged,
        input_gradient_seconds=backward + 2 * convolved + exchanged,
    )
