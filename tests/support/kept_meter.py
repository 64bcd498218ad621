"""The activation meter of tests of recomputation, which may discard what autograd saved."""

import weakref
from collections.abc import Iterable

import torch

from megatron_pp_ext.runtime.activation_meter import ActivationMeter, Owner
from megatron_pp_ext.runtime.storages import storages


class KeptMeter(ActivationMeter):
    """Knows what is kept, and not only its bytes when autograd saved it."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters)
        self._held: list[weakref.ref] = []

    def hold(self, owner: Owner | None, tensor: torch.Tensor, holder: object) -> None:
        """Count ``tensor`` as the activation meter does, and remember its ``holder``."""
        super().hold(owner, tensor, holder)
        self._held.append(weakref.ref(holder))

    @property
    def bytes_now(self) -> int:
        """The bytes of the storages that are kept; one that was emptied has none."""
        kept = [holder.tensor for one in self._held if (holder := one()) is not None]
        found = {key: size for tensor in kept for key, size in storages(tensor).items()}
        return sum(size for key, size in found.items() if key not in self._ignored)
