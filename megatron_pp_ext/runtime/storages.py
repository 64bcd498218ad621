"""The memory of tensors, some of which keep their numbers in other tensors.

Such wrappers are the weights of FP8 training.  Torch refuses the storage of a wrapper, and Transformer Engine
answers with an empty one.
"""

from collections.abc import Iterator
from typing import Any

import torch


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of their own in ``value``: a tensor, a wrapper, or a list of these.

    A wrapper names its tensors by torch's ``__tensor_flatten__``.  Quantized tensors of Transformer Engine
    have it since 2.20, and before that ``get_data_tensors``, which leaves out the scales.
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
