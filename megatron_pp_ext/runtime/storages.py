"""The memory of tensors, some of which keep their numbers in other tensors.

Such wrappers are the weights of FP8 training.  Torch refuses the storage of a wrapper, and Transformer Engine
answers with an empty one.
"""

from collections.abc import Iterator
from typing import Any

import torch


def plain_tensors(held: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of their own in ``held``: a tensor, a wrapper, or a list of these.

    A wrapper names its tensors by torch's ``__tensor_flatten__``.  What Transformer Engine quantizes has it
    since 2.20, and before that ``get_data_tensors``, which leaves out the scales.
    """
    if isinstance(held, list | tuple):
        for one in held:
            yield from plain_tensors(one)
    elif hasattr(held, "__tensor_flatten__"):
        names, _ = held.__tensor_flatten__()
        yield from plain_tensors([getattr(held, name) for name in names])
    elif hasattr(held, "get_data_tensors"):
        yield from plain_tensors(held.get_data_tensors())
    elif isinstance(held, torch.Tensor):
        yield held


def storages(held: Any) -> dict[torch.UntypedStorage, int]:
    """Return the bytes of each storage of the tensors in ``held`` that has any; see ``plain_tensors``.

    An address would not do for a storage: it passes to another where the first is emptied.
    """
    found = (tensor.untyped_storage() for tensor in plain_tensors(held))
    return {storage: size for storage in found if (size := storage.nbytes())}
