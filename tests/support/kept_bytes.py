"""The bytes that a forward keeps for its backward, by the activation meter and by the tensors alive."""

import gc
from collections.abc import Callable, Iterable

import torch

from megatron_pp_ext.runtime.activation_meter import ActivationMeter, _Handle, storages
from megatron_pp_ext.runtime.split import Owner


def kept_bytes(parameters: Iterable[torch.Tensor], forward: Callable[[], torch.Tensor]) -> int:
    """Return the meter's bytes after ``forward``, checked against the tensors alive, and run its backward."""
    weights = list(parameters)
    meter = ActivationMeter(weights)
    with meter.forward(Owner(0, 0)):
        output = forward()
    live = meter.live_bytes
    assert live == meter.peak_bytes == _alive(weights)
    output.sum().backward()
    assert (meter.live_bytes, meter.live_microbatches) == (0, 0)
    return live


def _alive(weights: list[torch.Tensor]) -> int:
    """Return the bytes of the tensors that autograd keeps; one whose storage was emptied has none."""
    sizes = storages([thing.tensor for thing in gc.get_objects() if type(thing) is _Handle])
    return sum(size for storage, size in sizes.items() if storage not in storages(weights))


def share_storage(target: torch.Tensor, source: torch.Tensor) -> None:
    """Give an emptied tensor the numbers of ``source``; Megatron's own way has to be compiled first."""
    target.untyped_storage().resize_(source.untyped_storage().nbytes())
    target.untyped_storage().copy_(source.untyped_storage())
