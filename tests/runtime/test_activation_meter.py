"""Bytes and microbatches that wait for their backward, on tensors whose sizes are known."""

import pytest
import torch
from torch.nn.functional import gelu

from megatron_pp_ext.runtime.activation_meter import ActivationMeter, watching
from megatron_pp_ext.runtime.split import Owner
from tests.support.wrapped import KINDS, Product, Wrapped, bytes_of, wrapped

ROWS, WIDTH = 4, 8
BYTES = 4 * ROWS * WIDTH
FIRST = Owner(0, 0)


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def test_bytes_of_a_linear_layer() -> None:
    """Its input waits, and neither its weight nor a view of it."""
    layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    meter = ActivationMeter(layer.parameters())
    with meter.forward(FIRST):
        output = layer(rows()) @ layer.weight[:, :2]
    # The input of the first product, and its output, which is that of the second.
    assert (meter.live_bytes, meter.live_microbatches) == (2 * BYTES, 1)
    output.sum().backward()
    assert (meter.live_bytes, meter.live_microbatches) == (0, 0)
    assert (meter.peak_bytes, meter.peak_microbatches) == (2 * BYTES, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_quantized_weight(kind: type[Wrapped]) -> None:
    """It does not wait, nor does the copy of it that the forward makes; what is no weight does."""
    weight, other = (torch.nn.Parameter(wrapped(kind, WIDTH, WIDTH)) for _ in range(2))
    meter, input = ActivationMeter([weight]), rows()
    with meter.forward(FIRST):
        output = Product.apply(Product.apply(input, weight), other)
    assert weight.transposed is not None
    assert meter.live_bytes == 2 * BYTES + bytes_of(other)
    output.sum().backward()
    assert (meter.live_bytes, weight.grad.shape) == (0, weight.shape)


def test_a_shared_tensor_counts_once() -> None:
    """And for as long as the last of those who share it."""
    meter, input = ActivationMeter(), rows()
    with meter.forward(FIRST):
        one, other = gelu(input), gelu(input)
    assert meter.live_bytes == BYTES
    one.sum().backward()
    assert meter.live_bytes == BYTES
    other.sum().backward()
    assert meter.live_bytes == 0


def test_what_a_slice_keeps_alive_counts() -> None:
    meter, input = ActivationMeter(), rows()
    with meter.forward(FIRST):
        output = gelu(input[:1])
    assert meter.live_bytes == BYTES
    del output
    assert meter.live_bytes == 0


def test_what_a_forward_empties_does_not_count() -> None:
    """Nor in the peak, though many layers may have had it; what takes its address counts."""
    meter = ActivationMeter()
    with meter.forward(FIRST):
        kept = []
        for _ in range(3):
            emptied = rows() * 1
            kept.append(gelu(emptied))
            emptied.untyped_storage().resize_(0)
            kept.append(gelu(rows()))
    assert (meter.live_bytes, meter.peak_bytes) == (3 * BYTES, 3 * BYTES)
    assert meter.live_microbatches == 1
    kept.clear()
    assert (meter.live_bytes, meter.live_microbatches) == (0, 0)


def test_a_peak_before_a_forward_stays() -> None:
    meter = ActivationMeter()
    for owner in (FIRST, Owner(0, 1)):
        with meter.forward(owner):
            gelu(gelu(rows()))
    assert (meter.live_bytes, meter.peak_bytes) == (0, 2 * BYTES)


def test_peaks_begin_with_what_is_alive() -> None:
    """A pipeline that never flushes begins a step with microbatches of the last one."""
    meter, input = ActivationMeter(), rows()
    with meter.forward(FIRST):
        kept = gelu(input)
    with meter.forward(Owner(0, 1)):
        gelu(rows() * 2)
    assert (meter.peak_bytes, meter.peak_microbatches) == (2 * BYTES, 2)
    meter.reset_peak()
    assert (meter.peak_bytes, meter.peak_microbatches) == (BYTES, 1)
    kept.sum().backward()


def test_stages_of_one_microbatch_count_apart() -> None:
    meter = ActivationMeter()
    kept = []
    for owner in (FIRST, Owner(1, 0), Owner(1, 1)):
        with meter.forward(owner):
            kept.append(gelu(rows()))
    assert meter.peak_microbatches == meter.live_microbatches == 3


def test_only_the_forward_inside_is_watched() -> None:
    meter = ActivationMeter()
    with meter.forward(FIRST):
        assert watching() is meter
    assert watching() is None
    gelu(rows())
    assert meter.peak_bytes == 0
