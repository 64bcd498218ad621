"""Activations that leave the device and come back: which, when their memory is free, and the same numbers."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_pp_ext.features.offload.runtime.host_buffers import HostBuffers
from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations
from megatron_pp_ext.runtime.activation_meter import ActivationMeter
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule.actions import label
from tests.support.copy_engines import Threads
from tests.support.saved_rows import BYTES, FIRST, ROWS, SECOND, WIDTH, rows, saved
from tests.support.split_linear import SplitLinear
from tests.support.wrapped import Product, Wrapped, wrapped


def away_with(limit: float = 1 << 20, smallest: int = BYTES) -> OffloadedActivations:
    return OffloadedActivations(HostBuffers(limit), Threads(), smallest)


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        SplitLinear(WIDTH, WIDTH), torch.nn.GELU(), SplitLinear(WIDTH, WIDTH), torch.nn.GELU()
    )


def gradients(module, input):
    return [input.grad, *(parameter.grad for parameter in module.parameters())]


def test_gradients_are_the_same_and_memory_is_free_meanwhile():
    expected_of, input_of = layers(), rows()
    expected_of(input_of).square().sum().backward()

    module, input, away = layers(), rows(), away_with()
    meter = ActivationMeter(module.parameters())
    with meter.forward(FIRST), away.saving(FIRST):
        output = module(input).square().sum()
    kept = meter.live_bytes
    # Inputs of two layers, two activation functions and the square; the first is the stage's.
    assert (kept, meter.live_microbatches) == (5 * BYTES, 1)
    away.offload(FIRST)
    assert meter.live_bytes == kept, "the copy may be under way"
    away.free(FIRST)
    assert meter.live_bytes == BYTES, "the input of the stage, which the caller holds"
    assert away.offloaded_bytes == away.buffers.used_bytes == 4 * BYTES
    away.reload(FIRST)
    assert (meter.live_bytes, away.buffers.used_bytes) == (kept, 0)
    output.backward()
    assert (meter.live_bytes, meter.peak_bytes) == (0, kept)
    away.close()
    assert all(map(torch.equal, gradients(module, input), gradients(expected_of, input_of)))


def test_what_waits_for_its_weight_gradient_is_counted():
    module, input, away = layers(), rows(), away_with()
    meter = ActivationMeter(module.parameters())
    with meter.forward(FIRST), away.saving(FIRST):
        output = module(input).square().sum()
    away.offload(FIRST)
    away.free(FIRST)
    away.reload(FIRST)
    STORE.meter = meter
    try:
        with STORE.collecting(FIRST):
            output.backward()
        # The inputs of both layers, and the gradients of their outputs.
        assert meter.live_bytes == 4 * BYTES
        STORE.run(FIRST)
    finally:
        STORE.meter = None
    assert meter.live_bytes == 0


def test_the_memory_itself_is_given_up():
    away, alive = away_with(), []
    with away.saving(FIRST):
        middle = rows() * 2
        alive.append(weakref.ref(middle.untyped_storage()))
        output = torch.nn.functional.gelu(middle)
        del middle
    away.offload(FIRST)
    assert alive[0]() is not None
    away.free(FIRST)
    assert alive[0]() is None
    away.reload(FIRST)
    output.sum().backward()


@pytest.mark.parametrize(
    "save",
    [
        lambda held: torch.nn.functional.gelu(held),
        lambda held: torch.nn.functional.gelu(held[:2]),
        lambda held: held @ torch.nn.Parameter(torch.ones(WIDTH, WIDTH)),
    ],
    ids=["itself", "view", "product"],
)
def test_what_somebody_else_holds_stays(save):
    away, held = away_with(), rows() * 1
    with away.saving(FIRST):
        save(held).sum()
    away.offload(FIRST)
    assert away.offloaded_bytes == 0


def test_weights_stay_and_what_is_made_of_them_and_kept():
    class Cached(torch.nn.Linear):
        def forward(self, input):
            if not hasattr(self, "cached"):
                self.cached = (self.weight * 2).detach()
            return input @ self.cached @ self.weight

    module, away = Cached(WIDTH, WIDTH, bias=False), away_with()
    for owner in (FIRST, SECOND):
        with away.saving(owner):
            output = module(rows()).sum()
        away.offload(owner)
        del output
    # The inner product; the input of the outer one needs no gradient of what is cached.
    assert away.offloaded_bytes == 2 * BYTES


def test_small_storages_and_wrapped_tensors_stay():
    away = away_with(smallest=BYTES + 1)
    output = saved(away, FIRST)
    away.offload(FIRST)
    away.reload(FIRST)
    weight = torch.nn.Parameter(wrapped(Wrapped, WIDTH, WIDTH))
    with away.saving(SECOND):
        product = Product.apply(rows(), weight)
    away.offload(SECOND)
    assert (away.offloaded_bytes, away.stayed_bytes) == (0, 0)
    away.reload(SECOND)
    (output.sum() + product.sum()).backward()


def test_a_storage_of_several_tensors_moves_once():
    away = away_with()
    with away.saving(FIRST):
        whole = torch.stack([rows(), rows()]) * 2
        one, other = whole[0], whole[1].t()
        output = (one * one).sum() + torch.nn.functional.gelu(other).sum() + one.exp().sum()
        expected = torch.autograd.grad(output, whole, retain_graph=True)[0]
    saved = whole.detach().clone()
    found = {}
    whole.register_hook(lambda gradient: found.update(gradient=gradient))
    del whole, one, other
    away.offload(FIRST)
    assert away.offloaded_bytes == 2 * BYTES + BYTES, "and the exponential"
    away.free(FIRST)
    away.reload(FIRST)
    output.backward()
    assert torch.equal(found["gradient"], expected)
    assert saved.shape == (2, ROWS, WIDTH)


def test_what_has_no_room_on_the_host_stays(caplog):
    module, input, away = layers(), rows(), away_with(limit=2.5 * BYTES)
    with away.saving(FIRST):
        output = module(input).square().sum()
    away.offload(FIRST)
    assert (away.offloaded_bytes, away.stayed_bytes) == (2 * BYTES, 2 * BYTES)
    (record,) = caplog.records
    assert record.getMessage() == (
        "activations of 128 bytes stay on the device, for the host holds 256 of at most 320 bytes: raise "
        "--pipeline-offload-host-bytes"
    )
    away.free(FIRST)
    away.reload(FIRST)
    output.backward()
    assert away.buffers.pinned_bytes == 2 * BYTES


def test_a_copy_to_the_host_waits_for_the_reader_of_its_buffer():
    waited = []

    class Watched(Threads):
        def to_host(self, transfers, after, timed):
            waited.append(list(after))
            return super().to_host(transfers, waited[-1], timed)

    away = OffloadedActivations(HostBuffers(BYTES), Watched(), BYTES)
    for owner in (FIRST, SECOND):
        output = saved(away, owner)
        away.offload(owner)
        away.free(owner)
        away.reload(owner)
        output.sum().backward()
    assert [len(one) for one in waited] == [0, 1]


def test_recomputed_layers():
    """What a checkpoint saves leaves; what its second forward saves in the backward is not asked for."""
    expected_of, input_of = layers(), rows()
    expected_of(input_of).square().sum().backward()
    module, input, away = layers(), rows(), away_with()
    with away.saving(FIRST):
        hidden = input
        for layer in module:
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        output = hidden.square().sum()
        del hidden
    away.offload(FIRST)
    assert away.offloaded_bytes == 4 * BYTES
    away.free(FIRST)
    away.reload(FIRST)
    output.backward()
    assert all(map(torch.equal, gradients(module, input), gradients(expected_of, input_of)))


def test_emptied_storages_stay():
    """Megatron's CheckpointWithoutOutput fills them again in the backward."""
    away = away_with(smallest=1)
    with away.saving(FIRST):
        emptied = rows() * 2
        output = torch.nn.functional.gelu(emptied)
    emptied.untyped_storage().resize_(0)
    away.offload(FIRST)
    assert away.offloaded_bytes == 0
    away.reload(FIRST)
    emptied.untyped_storage().resize_(BYTES)
    emptied.detach().fill_(0)
    output.sum().backward()


def test_a_backward_of_what_is_away_is_an_error():
    away = away_with()
    output = saved(away, FIRST)
    away.offload(FIRST)
    away.free(FIRST)
    with pytest.raises(RuntimeError, match="needs activations that are on the host: reload them"):
        output.sum().backward()
    with pytest.raises(RuntimeError, match=r"\[Owner\(stage=0, microbatch=0\)\] were left on the host"):
        away.close()


def test_what_a_backward_no_longer_needs_is_not_brought_back():
    away = away_with()
    output = saved(away, FIRST)
    away.offload(FIRST)
    away.free(FIRST)
    del output
    gc.collect()
    away.reload(FIRST)
    assert away.buffers.used_bytes == 0


def test_copies_are_recorded_with_their_times():
    recorder = StepRecorder()
    away = OffloadedActivations(HostBuffers(1 << 20), Threads(seconds_per_byte=1e-5), BYTES)
    output = saved(away, FIRST)
    away.offload(FIRST, recorder.span(label("out", *FIRST)))
    away.free(FIRST)
    away.reload(FIRST, recorder.span(label("back", *FIRST)))
    output.sum().backward()
    out, back = recorder.record.spans
    assert (out.label, back.label) == (label("out", *FIRST), label("back", *FIRST))
    assert out.end - out.start >= 1e-5 * BYTES and back.start >= out.end
