"""Takes a tree of values apart into a form, which is bytes, and its plain tensors; and puts it together.

The form is a pickle in which each plain tensor has only a place.  Tensors of other kinds (jagged, sparse,
quantized, of a subclass) are what torch pickles: plain tensors or storages, and how they belong together.
"""

import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Stands in a form for a plain tensor, whose numbers are bytes ``start`` to ``end`` of all."""

    dtype: torch.dtype
    shape: torch.Size
    start: int
    end: int
    on_host: bool


Placed = tuple[Place, torch.Tensor]


def pack(tree: Any) -> tuple[bytes, list[Placed]]:
    """Return the form of ``tree`` and its plain tensors in the order of their places.

    Raises whatever the objects' own methods raise where pickle cannot copy them.
    """
    written = io.BytesIO()
    packer = _Packer(written)
    packer.dump(tree)
    return written.getvalue(), list(packer.placed.values())


def unpack(form: bytes, tensor_at: Callable[[Place], torch.Tensor]) -> Any:
    """Return the tree of ``form``, whose plain tensors are what ``tensor_at`` returns."""
    unpickler = pickle.Unpickler(io.BytesIO(form))
    # A tensor that the tree has twice stays one: jagged tensors that share their offsets can be added.
    unpickler.persistent_load = cache(tensor_at)  # type: ignore[method-assign]
    return unpickler.load()


def check_copy(form: bytes, placed: list[Placed]) -> None:
    """Raise what unpacking would raise elsewhere: not all that pickle writes can be read."""
    unpack(form, dict(placed).__getitem__)


def obstacle(name: str, value: Any, around: tuple[Any, ...] = ()) -> str:
    """Return the first part of ``value``, called ``name``, that cannot be packed, and why; "" if all can."""
    try:
        check_copy(*pack(value))
    except Exception as error:  # whatever the objects' own methods raise
        around = (*around, value)
        parts = (
            (f"{name}{at}", part) for at, part in _parts(value) if not any(part is one for one in around)
        )
        inner = (obstacle(path, part, around) for path, part in parts)
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return next(filter(None, inner), f"{name} cannot be copied ({why})")
    return ""


class _Packer(pickle.Pickler):
    def __init__(self, written: io.BytesIO) -> None:
        super().__init__(written, pickle.HIGHEST_PROTOCOL)
        self.placed: dict[int, Placed] = {}
        self._end = 0

    def persistent_id(self, value: Any) -> Place | None:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return None
        if id(value) not in self.placed:
            start, self._end = self._end, self._end + value.numel() * value.element_size()
            on_host = value.device.type == "cpu"
            self.placed[id(value)] = Place(value.dtype, value.shape, start, self._end, on_host), value
        return self.placed[id(value)][0]

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.UntypedStorage):
            numbers = torch.empty(0, dtype=torch.uint8, device=value.device)
            return torch.Tensor.untyped_storage, (numbers.set_(value),)
        if isinstance(value, torch.TypedStorage):
            return _typed, (value._untyped_storage, value.dtype)
        if type(value) is defaultdict and obstacle("", value.default_factory):
            return defaultdict, (), None, None, iter(value.items())
        return NotImplemented


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is its numbers in memory, and nothing else."""
    is_special = tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor.layout != torch.strided
    return not is_special and not vars(tensor)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{at}]", part) for at, part in enumerate(value))
    elif not isinstance(value, (type, ModuleType)):
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
