"""Copies that end late, as a device's do: what they write to is nobody else's until somebody has waited."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch

from megatron_pp_ext.features.offload.runtime.host_buffers import HostBuffers
from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations
from megatron_pp_ext.features.offload.runtime.operations import Free, Reload
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.split import Owner
from megatron_pp_ext.schedule import catalog
from tests.support.offloaded import with_offloaded
from tests.support.saved_rows import BYTES, FIRST, ROWS, SECOND, WIDTH, rows, saved
from tests.support.split_linear import SplitLinear


class Late:
    """Copies that hold nothing and begin only when somebody waits, or when all of them are ``flushed``.

    ``freed`` counts those whose target was given to somebody else by then.  ``current`` is the stream.
    """

    def __init__(self):
        self.launched, self.freed, self.current = [], 0, None

    def to_host(self, transfers, after, timed):
        return self._launch(transfers, after)

    def to_device(self, transfers, after, timed):
        return self._launch(transfers, after)

    def stream(self):
        return self.current

    def flush(self):
        for copy in self.launched:
            copy.wait()

    def _launch(self, transfers, after):
        self.launched.append(LateCopy(self, transfers, list(after)))
        return self.launched[-1]


class LateCopy:
    def __init__(self, engines, transfers, after):
        self.engines, self.after, self.size = engines, after, sum(one.source.nbytes for one in transfers)
        self.left = [
            tuple((weakref.ref(one.untyped_storage()), one.nbytes) for one in pair) for pair in transfers
        ]

    def wait(self):
        for copy in self.after:
            copy.wait()
        for source, target in self.left:
            (read, size), (written, _) = source, target
            if read() is None or written() is None:
                self.engines.freed += 1
            else:
                _bytes(written(), size).copy_(_bytes(read(), size))
        self.left = self.after = ()

    synchronize = wait


def _place(tensor):
    return weakref.ref(tensor.untyped_storage()), tensor.nbytes


def _bytes(storage, size):
    return torch.empty(0, dtype=torch.uint8).set_(storage)[:size]


@pytest.fixture
def engines():
    return Late()


@pytest.fixture
def away(engines):
    return OffloadedActivations(HostBuffers(1 << 20), engines, BYTES)


def there_and_back(away, *owners):
    for owner in owners:
        away.offload(owner)
        away.free(owner)
    for owner in owners:
        away.reload(owner)


class Circle:
    """Holds a graph until Python's collector finds it."""

    def __init__(self, graph):
        self.own, self.graph = self, graph


@pytest.mark.parametrize("when", ["away", "back"])
def test_what_dies_between_forward_and_backward(when, engines, away):
    """A metric that nobody detached is collected while it is on the host, or while it is on its way back."""
    gc.disable()
    try:
        with away.saving(FIRST):
            output = torch.nn.functional.gelu(rows() * 2)
            Circle((rows() * 3).exp().square())
        away.offload(FIRST)
        away.free(FIRST)
        assert away.offloaded_bytes == 2 * BYTES, "exp and square save the same"
        if when == "away":
            gc.collect()
        away.reload(FIRST)
    finally:
        gc.enable()
        gc.collect()
    assert engines.launched[-1].size == {"away": 1, "back": 2}[when] * BYTES
    scratch = [torch.zeros(ROWS, WIDTH) for _ in range(8)]  # takes what is free
    output.sum().backward()
    engines.flush()
    assert engines.freed == 0 and not any(one.any() for one in scratch)
    away.close()
    assert away.buffers.used_bytes == 0


@pytest.mark.parametrize("owners", [(FIRST,), (FIRST, SECOND)], ids=["one", "two"])
@pytest.mark.parametrize("is_alive", [False, True])
def test_what_no_backward_waits_for_is_waited_for_at_the_end_of_the_step(engines, away, owners, is_alive):
    """All of several copies back, whether or not somebody still holds the graphs that they are for."""
    outputs = [saved(away, owner) for owner in owners]
    there_and_back(away, *owners)
    back = engines.launched[len(owners) :]
    if not is_alive:
        del outputs
    assert all(copy.left for copy in back), "nobody has waited"
    away.close()
    assert not any(copy.left for copy in back) and engines.freed == 0


def failed_step(away, engines, what):
    """Begin a step of two microbatches, and leave it where ``what`` of the first one would come next."""
    outputs = [saved(away, FIRST), saved(away, SECOND)]
    done = ["offload", "free", "reload", "backward"][: ["offload", "free", "reload", "backward"].index(what)]
    for act in done:
        getattr(away, act)(FIRST)
    return outputs


@pytest.mark.parametrize("what", ["offload", "free", "reload", "backward"])
@pytest.mark.parametrize("is_abandoned", [True, False])
@pytest.mark.parametrize("is_alive", [True, False])
def test_a_step_after_one_that_failed_is_as_good_as_the_first(engines, away, what, is_abandoned, is_alive):
    """Also a shorter one, where the failure was not reported, and while somebody holds what is left."""
    outputs = failed_step(away, engines, what)
    if not is_alive:
        del outputs
    if is_abandoned:
        away.abandon()
        assert away.buffers.used_bytes == 0
    output = saved(away, FIRST)
    there_and_back(away, FIRST)
    assert away.offloaded_bytes, "a copy was made"
    output.sum().backward()
    away.close()
    engines.flush()
    assert away.buffers.used_bytes == 0 and engines.freed == 0
    reference = saved(OffloadedActivations(HostBuffers(1 << 20), engines, BYTES), SECOND)
    assert torch.equal(output, reference)


def test_a_copy_to_a_buffer_follows_the_copy_of_a_failed_step(engines, away):
    outputs = failed_step(away, engines, "reload")
    first = engines.launched[0]
    away.abandon()
    assert not first.left, "what is computed next waits before it uses the memory that was read"
    again = saved(away, FIRST)
    away.offload(FIRST)
    assert first in engines.launched[1].after, "both write to one buffer"
    del outputs, again


def test_memory_on_its_way_is_free_once_a_backward_has_waited(engines, away):
    output = saved(away, FIRST)
    there_and_back(away, FIRST)
    (arrival,) = away._arriving
    memory = weakref.ref(arrival.memory[0].untyped_storage())
    output.sum().backward()
    assert memory() is None and engines.freed == 0


def test_the_host_s_memory_of_what_has_died_is_used_again_behind_its_copies(engines, away):
    output = saved(away, FIRST)
    away.offload(FIRST)
    away.free(FIRST)
    del output
    away.reload(FIRST)
    output = saved(away, SECOND)
    away.offload(SECOND)
    assert away.buffers.pinned_bytes == BYTES
    assert engines.launched[-1].after == [engines.launched[-2]]
    away.free(SECOND)
    away.reload(SECOND)
    output.sum().backward()


def test_what_another_stream_computes_stays(engines, away):
    """Its memory cannot be given up on the compute stream."""
    with away.saving(FIRST):
        output = torch.nn.functional.gelu(rows() * 2)
        engines.current = "exchanges"
        other = torch.nn.functional.gelu(rows() * 3)
        engines.current = None
    there_and_back(away, FIRST)
    assert away.offloaded_bytes == BYTES
    (output.sum() + other.sum()).backward()


@pytest.mark.parametrize(
    "view",
    [lambda z: z.conj().imag, lambda z: torch.view_as_real(z.conj() * 1)[..., 1], lambda z: z.conj()],
    ids=["negated", "plain", "conjugate"],
)
def test_views_come_back_with_their_sign(view, away):
    def gradient(save):
        leaf = torch.randn(ROWS, WIDTH, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        leaf.requires_grad_()
        with away.saving(FIRST) if save else torch.enable_grad():
            one = view(leaf * 2)
            output = (one * one).sum()
            del one
        if save:
            there_and_back(away, FIRST)
        output.abs().backward()
        return leaf.grad

    assert torch.equal(gradient(save=True), gradient(save=False))


def test_many_microbatches_give_the_gradients_that_they_give_without_copies(engines, away):
    """Copies are as late as waits let them be, and buffers are used again."""

    def gradients(save):
        torch.manual_seed(0)
        module, outputs = torch.nn.Sequential(SplitLinear(WIDTH, WIDTH), torch.nn.GELU()), {}
        for microbatch in range(4):
            owner = Owner(0, microbatch)
            with away.saving(owner) if save else torch.enable_grad():
                outputs[owner] = (module(rows() * (microbatch + 1)).square()).sum()
            if save and microbatch % 2:
                there_and_back(away, Owner(0, microbatch - 1), owner)
        for output in outputs.values():
            output.backward()
        return [parameter.grad for parameter in module.parameters()]

    assert all(map(torch.equal, gradients(save=True), gradients(save=False)))
    assert away.offloaded_bytes > away.buffers.pinned_bytes > 0 == engines.freed
    away.close()


@pytest.mark.parametrize("name", ["gpipe", "v-half"])
def test_memory_is_given_up_before_other_memory_is_taken(name):
    """Otherwise the two would take room together."""
    operations = plan_rank(with_offloaded(catalog.build(name, 2, 6)), 0).operations
    neighbours = set(pairwise(map(type, operations)))
    assert (Free, Reload) in neighbours and (Reload, Free) not in neighbours
