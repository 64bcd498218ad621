"""Measures how many bytes of activations are alive, by the memory of their tensors."""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_pp_ext.runtime.split import Owner


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of their own in ``value``: a tensor, a wrapper, or a list of these.

    A wrapper names its tensors by torch's ``__tensor_flatten__``.  Quantized tensors of Transformer Engine
    have it since 2.20, and before that ``get_data_tensors``, which leaves out the scales.

    The weights of FP8 training are such wrappers.  Torch refuses the storage of a wrapper, and Transformer
    Engine answers with an empty one.
    """
    if isinstance(value, list | tuple):
        for part in value:
            yield from plain_tensors(part)
    elif hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        yield from plain_tensors([getattr(value, name) for name in names])
    elif hasattr(value, "get_data_tensors"):
        yield from plain_tensors(value.get_data_tensors())
    elif isinstance(value, torch.Tensor):
        yield value


def storages(value: Any) -> dict[torch.UntypedStorage, int]:
    """Return the bytes of each storage of the tensors in ``value`` that has any; see ``plain_tensors``.

    An address would not do for a storage: it passes to another where the first is emptied.
    """
    all_storages = (tensor.untyped_storage() for tensor in plain_tensors(value))
    return {storage: size for storage in all_storages if (size := storage.nbytes())}


class _Handle:
    """Stands for a saved tensor in the autograd graph."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class ActivationMeter:
    """Counts the bytes, and the microbatches, that wait for their backward on this rank.

    ``parameters`` are not activations, though layers save them, nor is anything that shares their
    storage.  A storage that several saved tensors share counts once, and one that its forward emptied not
    at all: data that a backward puts back there is not kept.  Tensors of a deferred weight gradient, which
    may have such a storage, count until its W has run (see ``split``).

    Autograd lets a hook see every tensor that a forward keeps for its backward, and the object that the hook
    returns lives exactly as long as the tensor is needed.  Watching these objects come and go, storage by
    storage, gives the live bytes on a CPU too, where no allocator counts them.

    Megatron empties some storages while tensors of them are saved, and has the backward fill them again: the
    results of modules in --recompute-modules (``CheckpointWithoutOutput``), the inputs of a plan's nodes.
    Torch has no hook for this, so the sizes of saved tensors are read again at a forward's end.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        # By storage, since autograd shows a hook not the parameter itself but an alias of it.
        self._ignored = weakref.WeakSet(storages(list(parameters)))
        self._owner: Owner | None = None
        self._uses: Counter[torch.UntypedStorage] = Counter()
        self._bytes_of: dict[torch.UntypedStorage, int] = {}
        self._owned: defaultdict[Owner, Counter[torch.UntypedStorage]] = defaultdict(Counter)
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_microbatches = 0

    @property
    def live_microbatches(self) -> int:
        """The number of (stage, microbatch) pairs that hold on to any tensor."""
        return len(self._owned)

    def reset_peak(self) -> None:
        """Set the peaks to the present amounts."""
        self.peak_bytes, self.peak_microbatches = self.live_bytes, self.live_microbatches

    @contextmanager
    def forward(self, owner: Owner) -> Iterator[None]:
        """Count for ``owner`` the tensors that the forward inside keeps.

        What it emptied by its end is taken from the peak inside, which is the peak at its end unless the
        backward of a pair releases something before.
        """
        global _watching
        self._owner = owner
        _watching = self
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            try:
                yield
            finally:
                self._owner = _watching = None
                self.peak_bytes = max(peak, self.peak_bytes + self._read_again(owner))

    def pack(self, tensor: torch.Tensor) -> _Handle:
        """Return the object that autograd keeps in place of ``tensor``; see ``watching``."""
        holder = _Handle(tensor)
        if self._owner is not None:
            self.hold(self._owner, tensor, holder)
        return holder

    @staticmethod
    def unpack(holder: _Handle) -> torch.Tensor:
        """Return the tensor that ``holder`` stands for."""
        return holder.tensor

    def hold(self, owner: Owner | None, tensor: torch.Tensor, holder: object) -> None:
        """Count ``tensor`` for as long as ``holder`` lives; without an ``owner`` its bytes alone."""
        sizes = storages(tensor)
        if any(storage in self._ignored for storage in sizes):
            # A quantized weight is ignored whole, with the transposed copy that its first forward made.
            return
        for storage, size in sizes.items():
            self._count(storage, size)
            self._uses[storage] += 1
            if owner is not None:
                self._owned[owner][storage] += 1
            weakref.finalize(holder, self._release, owner, storage)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.peak_microbatches = max(self.peak_microbatches, self.live_microbatches)

    def _count(self, storage: torch.UntypedStorage, size: int) -> None:
        change = size - self._bytes_of.get(storage, 0)
        self._bytes_of[storage] = size
        self.live_bytes += change

    def _read_again(self, owner: Owner) -> int:
        """Return the growth of the memory held for ``owner``; it is negative where some was emptied."""
        before = self.live_bytes
        for storage in tuple(self._owned.get(owner, ())):
            self._count(storage, storage.nbytes())
        return self.live_bytes - before

    def _release(self, owner: Owner | None, storage: torch.UntypedStorage) -> None:
        _take_one(self._uses, storage)
        if storage not in self._uses:
            self.live_bytes -= self._bytes_of.pop(storage)
        if owner is None:
            return
        _take_one(self._owned[owner], storage)
        if not self._owned[owner]:
            del self._owned[owner]


def _take_one(counts: Counter[torch.UntypedStorage], storage: torch.UntypedStorage) -> None:
    counts[storage] -= 1
    if not counts[storage]:
        del counts[storage]


def keep_shape(received: torch.Tensor) -> None:
    """Let a gradient reach ``received``, if that is a leaf, though its data was cut meanwhile.

    Megatron's --distribute-saved-activations leaves a part of the data in the leaf, and makes it whole in
    what autograd saved.  That is the leaf itself, but a copy of it where hooks see saved tensors.
    """
    if not received.requires_grad or not received.is_leaf:
        return
    leaf = weakref.ref(received)

    def fit(gradient: torch.Tensor) -> None:
        tensor = leaf()
        if tensor is not None and tensor.shape != gradient.shape:
            tensor.data = gradient

    received.register_hook(fit)


_watching: ActivationMeter | None = None


def watching() -> ActivationMeter | None:
    """Return the meter that watches the forward running now, if any.

    Autograd calls the innermost hooks only.  Other hooks within a forward therefore hand the tensors that
    they have no use for to this meter's ``pack`` and ``unpack``.
    """
    return _watching
