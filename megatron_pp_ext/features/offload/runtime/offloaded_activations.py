"""Activations that wait for their backward on the host.

Around a forward whose activations will be offloaded, hooks see what autograd saves (``saving``).  After it
they are copied to the host (``offload``), their memory on the device is freed once that is done (``free``),
and they are reloaded into other memory in time for their backward (``reload``), as far as somebody still
needs them.

All memory of the device is allocated and freed on the compute stream, which waits for each copy before the
memory that the copy reads is freed.  So the allocator can use it again at once, however far the host runs
ahead of the device; memory that is recorded on a second stream stays allocated until the host finds that
stream done.  For the same reason, memory that a copy writes to is held until the compute stream waits for
that copy, though what it is for may be gone by then.

What moves are whole storages that nobody but autograd holds: the others would stay on the device anyway.
Among these are weights, with all that is made of them and kept, the stage's input, and its output.
"""

import logging
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megatron_pp_ext.features.offload.runtime.host_buffers import (
    Completion,
    CopyEngines,
    HostBuffer,
    HostBuffers,
    Timed,
    Transfer,
)
from megatron_pp_ext.runtime.activation_meter import ActivationMeter, watching
from megatron_pp_ext.runtime.split import Owner


class _Counted:
    """Lives as long as the activation meter has to count a tensor."""

    __slots__ = ("__weakref__",)


class _Saved:
    """Stands for a saved tensor in the autograd graph, wherever the tensor is."""

    __slots__ = ("__weakref__", "arrival", "counted", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.counted: _Counted | None = None
        self.arrival: _CopyBack | None = None


class _CopyBack:
    """A copy back to the device, which holds its target memory until computation has waited for it."""

    __slots__ = ("copy", "memory")

    def __init__(self, copy: Completion, memory: list[torch.Tensor]) -> None:
        self.copy, self.memory = copy, memory

    def wait(self) -> None:
        self.copy.wait()
        self.memory.clear()


class _StoragePlace(NamedTuple):
    """Where in a storage the tensor of ``saved`` lies."""

    saved: "weakref.ref[_Saved]"
    dtype: torch.dtype
    offset: int | torch.SymInt
    shape: torch.Size
    stride: tuple[int, ...]


class _Storage(NamedTuple):
    """An offloaded storage and the places of its tensors."""

    device: torch.device
    size: int
    buffer: HostBuffer
    places: list[_StoragePlace]


@dataclass(slots=True)
class _SavedMicrobatch:
    """The saved tensors of a forward; ``leaving`` holds copied ones until their memory may be freed."""

    meter: ActivationMeter | None
    saved: list["weakref.ref[_Saved]"] = field(default_factory=list)
    offloaded: list[_Storage] = field(default_factory=list)
    leaving: list[tuple[torch.Tensor, _Counted | None]] = field(default_factory=list)
    sent: Completion | None = None


class OffloadedActivations:
    """The offloaded activations of one rank.

    They wait in ``buffers``, and ``engines`` copy them.  Tensors that do not fit into the buffers stay on the
    device, which is logged once as a warning, and so do storages of fewer than ``smallest`` bytes.
    Since the beginning, ``offloaded_bytes`` count copied tensors, ``stayed_bytes`` the ones without a buffer,
    and ``small_bytes`` those that were too small.
    """

    def __init__(self, buffers: HostBuffers, engines: CopyEngines, smallest: int) -> None:
        self.buffers = buffers
        self._engines, self._smallest = engines, smallest
        self._microbatches: dict[Owner, _SavedMicrobatch] = {}
        self._begun: set[Owner] = set()
        self._arriving: list[_CopyBack] = []
        self.offloaded_bytes = self.stayed_bytes = self.small_bytes = 0

    @contextmanager
    def saving(self, owner: Owner) -> Iterator[None]:
        """Record the tensors that the forward of ``owner``, run inside, saves for its backward.

        The activation meter, whose hooks are not called meanwhile, counts it as ever.  What comes a second
        time without an end of the step is of a new step, after one that failed.
        """
        if owner in self._begun:
            self.abandon()
        self._begun.add(owner)
        meter, stream = watching(), self._engines.stream()
        state = self._microbatches[owner] = _SavedMicrobatch(meter)

        def pack(tensor: torch.Tensor) -> _Saved:
            # Another tensor of the same storage: its uses then show whether somebody holds this one.
            saved = _Saved(tensor.detach() if _is_plain(tensor) else tensor)
            if meter is not None:
                saved.counted = _Counted()
                meter.hold(owner, tensor, saved.counted)
            # The compute stream cannot free memory of another one, such as that of exchanges in a pair.
            if self._engines.stream() == stream:
                state.saved.append(weakref.ref(saved))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield

    def offload(self, owner: Owner, timed: Timed | None = None) -> None:
        """Launch the copy to the host of the tensors that ``owner`` has saved and nobody else holds.

        ``timed`` is the context of the copy for a recorder.
        """
        state = self._microbatches[owner]
        transfers, after = [], []
        for storage, saved in _by_storage(state.saved).items():
            size = storage.nbytes()
            # The storage as Python sees it is one more use.
            if torch._C._storage_Use_Count(storage._cdata) > len(saved) + 1:
                continue
            if size < self._smallest:
                self.small_bytes += size
                continue
            buffer = self.buffers.take(size)
            if buffer is None:
                self._let_stay(size)
                continue
            if buffer.last_use is not None:
                after.append(buffer.last_use)
            transfers.append(Transfer(_bytes(storage), buffer.memory[:size]))
            state.offloaded.append(
                _Storage(storage.device, size, buffer, [_take(reference, state) for reference in saved])
            )
            self.offloaded_bytes += size
        state.saved.clear()
        if transfers:
            state.sent = self._engines.to_host(transfers, after, timed or nullcontext())

    def free(self, owner: Owner) -> None:
        """Let later computation use the device memory of ``owner``, once it is copied."""
        state = self._microbatches[owner]
        if state.sent is not None:
            state.sent.wait()
        for tensor, _ in state.leaving:
            if tensor.is_cuda:  # it may come from another stream, which has not waited
                tensor.record_stream(torch.cuda.current_stream())
        state.leaving.clear()

    def reload(self, owner: Owner, timed: Timed | None = None) -> None:
        """Launch the copy back to the device, for which the backward waits; ``timed`` as in ``offload``."""
        state = self._microbatches[owner]
        if state.sent is None:
            del self._microbatches[owner]
            return
        transfers: list[Transfer] = []
        arrivals: list[tuple[_Saved, _StoragePlace, torch.Tensor]] = []
        for storage in state.offloaded:
            alive = [(saved, place) for place in storage.places if (saved := place.saved()) is not None]
            if alive:
                memory = torch.empty(storage.size, dtype=torch.uint8, device=storage.device)
                transfers.append(Transfer(storage.buffer.memory[: storage.size], memory))
                arrivals += [(saved, place, memory) for saved, place in alive]
        copy = self._engines.to_device(transfers, [state.sent], timed or nullcontext())
        del self._microbatches[owner]
        arrival = _CopyBack(copy, [transfer.target for transfer in transfers])
        self._arriving = [*(pending for pending in self._arriving if pending.memory), arrival]
        for storage in state.offloaded:
            storage.buffer.last_use = copy
            self.buffers.give_back(storage.buffer)
        for saved, place, memory in arrivals:
            _put(saved, place, memory)
            saved.arrival = arrival
            if state.meter is not None:
                saved.counted = _Counted()
                state.meter.hold(owner, memory, saved.counted)

    def close(self) -> None:
        """End a step; RuntimeError where activations were left on the host.

        Later computation waits for copies that no backward has waited for.
        """
        self._take_arrivals()
        if self._microbatches:
            raise RuntimeError(f"activations of {sorted(self._microbatches)} were left on the host")

    def abandon(self) -> None:
        """End a step that has failed: return the buffers of activations on the host or on their way there.

        Later computation waits for the step's copies, of which some read memory of the device.
        """
        for state in self._microbatches.values():
            if state.sent is not None:
                state.sent.wait()
            for storage in state.offloaded:
                storage.buffer.last_use = state.sent or storage.buffer.last_use
                self.buffers.give_back(storage.buffer)
        self._microbatches.clear()
        self._take_arrivals()

    def _take_arrivals(self) -> None:
        self._begun.clear()
        for arrival in self._arriving:
            if arrival.memory:
                arrival.wait()
        self._arriving.clear()

    def _let_stay(self, size: int) -> None:
        if not self.stayed_bytes:
            _LOGGER.warning(
                "activations of %d bytes stay on the device, for the host holds %d of at most %d bytes: "
                "raise --pipeline-offload-host-bytes",
                size,
                self.buffers.used_bytes,
                self.buffers.limit,
            )
        self.stayed_bytes += size


_LOGGER = logging.getLogger(__name__)


def _unpack(saved: _Saved) -> torch.Tensor:
    if saved.tensor is None:
        raise RuntimeError("a backward needs activations that are on the host: reload them before it")
    if saved.arrival is not None:
        saved.arrival.wait()
    return saved.tensor


def _by_storage(refs: Iterable["weakref.ref[_Saved]"]) -> dict[torch.UntypedStorage, list[_Saved]]:
    """Return the tensors that are alive and can be copied as bytes, by storage."""
    by_storage: defaultdict[torch.UntypedStorage, list[_Saved]] = defaultdict(list)
    for ref in refs:
        saved = ref()
        if saved is not None and saved.tensor is not None and _is_plain(saved.tensor):
            by_storage[saved.tensor.untyped_storage()].append(saved)
    return by_storage


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _take(saved: _Saved, state: _SavedMicrobatch) -> _StoragePlace:
    """Take the tensor of ``saved``, which ``state`` keeps until it is copied, and return its place."""
    tensor = saved.tensor
    assert tensor is not None
    state.leaving.append((tensor, saved.counted))
    saved.tensor = saved.counted = None
    return _StoragePlace(
        weakref.ref(saved), tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _put(saved: _Saved, place: _StoragePlace, memory: torch.Tensor) -> None:
    """Give ``saved`` its tensor at ``place`` back, whose storage is now ``memory``."""
    empty = torch.empty(0, dtype=place.dtype, device=memory.device)
    saved.tensor = empty.set_(memory.untyped_storage(), place.offset, place.shape, place.stride)
