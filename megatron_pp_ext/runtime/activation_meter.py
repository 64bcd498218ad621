"""Measures how many bytes of activations are alive.

Autograd lets a hook see every tensor that a forward keeps for its backward, and the object that
the hook returns lives exactly as long as the tensor is needed.  Watching these objects come and
go, storage by storage, gives the live bytes on a CPU too, where no allocator counts them.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from megatron_pp_ext.runtime.storages import storages


class Owner(NamedTuple):
    """The stage and the microbatch that tensors or deferred work belong to."""

    stage: int
    microbatch: int


class _Kept:
    """Stands for a saved tensor in the autograd graph."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class ActivationMeter:
    """Counts the bytes, and the microbatches, that wait for their backward on this rank.

    ``parameters`` are not activations, though layers save them, nor is anything that shares their
    storage.  A storage that several saved tensors share counts once.
    What a deferred weight gradient holds on to counts until its W has run (see ``split``).
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        # By storage, since autograd shows a hook not the parameter itself but an alias of it.
        self._ignored = set(storages(list(parameters)))
        self._owner: Owner | None = None
        self._uses: Counter[int] = Counter()
        self._bytes_of: dict[int, int] = {}
        self._owned: Counter[Owner] = Counter()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_microbatches = 0

    @property
    def live_microbatches(self) -> int:
        """The number of (stage, microbatch) pairs that hold on to any tensor."""
        return len(self._owned)

    def reset_peak(self) -> None:
        """Set the peaks to what is alive now."""
        self.peak_bytes, self.peak_microbatches = self.live_bytes, self.live_microbatches

    @contextmanager
    def forward(self, owner: Owner) -> Iterator[None]:
        """Count for ``owner`` the tensors that the forward inside keeps."""
        global _watching
        self._owner = owner
        _watching = self
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            try:
                yield
            finally:
                self._owner = _watching = None

    def pack(self, tensor: torch.Tensor) -> _Kept:
        """Return the object that autograd keeps in place of ``tensor``; see ``watching``."""
        kept = _Kept(tensor)
        if self._owner is not None:
            self.hold(self._owner, tensor, kept)
        return kept

    @staticmethod
    def unpack(kept: _Kept) -> torch.Tensor:
        """Return the tensor that ``kept`` stands for."""
        return kept.tensor

    def hold(self, owner: Owner | None, tensor: torch.Tensor, holder: object) -> None:
        """Count ``tensor`` for as long as ``holder`` lives; without an ``owner`` its bytes alone."""
        found = storages(tensor)
        if not self._ignored.isdisjoint(found):
            # A quantized weight is ignored whole, with the transposed copy that its first forward made.
            return
        for key, size in found.items():
            if not self._uses[key]:
                self._bytes_of[key] = size
                self.live_bytes += size
            self._uses[key] += 1
            if owner is not None:
                self._owned[owner] += 1
            weakref.finalize(holder, self._release, owner, key)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.peak_microbatches = max(self.peak_microbatches, self.live_microbatches)

    def _release(self, owner: Owner | None, key: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self.live_bytes -= self._bytes_of.pop(key)
        if owner is None:
            return
        self._owned[owner] -= 1
        if not self._owned[owner]:
            del self._owned[owner]


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
