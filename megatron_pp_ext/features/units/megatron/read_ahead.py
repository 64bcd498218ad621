"""The microbatches of a step that are read before it, and handed to the loop in another order.

A loop that asks for an order promises that its data can be read ahead, one item a microbatch and by ``next``
alone.  What contradicts this and can be seen ends the step in one line.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import wraps
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_pp_ext.features.units.megatron.agreement import Documents, UnknownLengths
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.options import Ordering, lengths_of_batch
from megatron_pp_ext.megatron.runners.model_stage import ForwardStep, StepInputs

_FIX = "or leave the order out"

_IMMUTABLE = int, float, str, bytes, tuple, type(None)
"""The types of items that an iterator may yield again: they cannot have changed."""

_FIRST, _EVERY = 16, 16
"""How many numbers of a row are compared, and which of the others."""

type Batches = list[Any] | None
"""The items of a step for one chunk, None where it is given no data."""


class Planned:
    """An iterator over ``batches``, which were read ahead from ``data``, for the loop.

    It has nothing but ``next``, once in each call of the forward step, which ``begin`` announces.
    RuntimeError where the loop reads more, or uses anything else that ``data`` has: that would be of data
    that is read already.
    """

    def __init__(self, data: Any, batches: Sequence[Any]) -> None:
        self._data, self._batches = data, batches
        self._may_read = False
        self.count = 0

    def begin(self) -> None:
        """Permit the one item of a call of the forward step."""
        self._may_read = True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._may_read:
            raise RuntimeError(
                "the forward step reads more than one item for a microbatch, and an order needs one for "
                f"each; put what belongs to a microbatch into one item, {_FIX}"
            )
        self._may_read = False
        self.count += 1
        return self._batches[self.count - 1]

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        if not hasattr(type(self._data), "__len__"):
            raise TypeError(f"object of type {type(self._data).__name__!r} has no len()")
        raise _other_use("len()")

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._data, name):
            raise AttributeError(f"{type(self._data).__name__!r} object has no attribute {name!r}")
        raise _other_use(name)

    def require_one_each(self) -> None:
        """Raise RuntimeError where the loop has read some of the items of a step, and not all."""
        if self.count not in (0, len(self._batches)):
            raise RuntimeError(
                f"the forward step has read {self.count} of the items of {len(self._batches)} microbatches, "
                f"and an order needs one for each; read one in each call, {_FIX}"
            )


def planned(iterators: Sequence[Any], data: Sequence[Batches], order: Sequence[int]) -> list[Any]:
    """Return iterators over ``data``, the items of each chunk, in this ``order`` of microbatches."""
    return [
        iterator if batches is None else Planned(iterator, [batches[number] for number in order])
        for iterator, batches in zip(iterators, data, strict=True)
    ]


def one_item_each(forward_step: ForwardStep) -> ForwardStep:
    """Return ``forward_step``, each call of which may read one item of a ``Planned`` iterator."""

    @wraps(forward_step)
    def step(iterator: Any, *arguments: Any, **more: Any) -> Any:
        if isinstance(iterator, Planned):
            iterator.begin()
        return forward_step(iterator, *arguments, **more)

    return step


def require_read(iterators: Sequence[Any], has_first_stage: bool) -> None:
    """Raise RuntimeError unless the loop has read its ``planned`` iterators as an order needs it.

    The rank with the first stage reads tokens, if it is given any data.
    """
    read = [iterator for iterator in iterators if isinstance(iterator, Planned)]
    for iterator in read:
        iterator.require_one_each()
    if has_first_stage and read and not any(iterator.count for iterator in read):
        raise RuntimeError(
            "the forward step reads nothing by next(data_iterator), and an order is one of what it reads "
            f"there; read each microbatch from the iterator, {_FIX}"
        )


def read_documents(inputs: StepInputs, data: list[Batches], ordering: Ordering) -> Documents | None:
    """Read the step's microbatches into ``data``, by chunks; return the lengths of their documents.

    None on a rank that is given no data.  RuntimeError, in one line, for data that cannot be read ahead or
    ordered, and UnknownLengths where the function of ``ordering`` raises ValueError; what an iterator raises
    comes through.
    """
    iterators = [iterator for iterator in inputs.iterators if iterator is not None]
    if len(set(map(id, iterators))) < len(iterators):
        raise RuntimeError(
            f"chunks of this rank read one data iterator; give each chunk an iterator of its own, {_FIX}"
        )
    for iterator in iterators:
        if not hasattr(iterator, "__next__"):
            raise RuntimeError(
                f"the data iterator is a {type(iterator).__name__}, and an order reads ahead by next(); give "
                f"it a method __next__, {_FIX}"
            )
    for iterator in inputs.iterators:
        data.append(None if iterator is None else _read(iterator, inputs.microbatches))
    items = next((batches for batches in data if batches is not None), None)
    if items is None:
        return None
    documents = tuple(_lengths(ordering, number, item) for number, item in enumerate(items))
    try:
        return Microbatches(documents).documents
    except ValueError as error:
        raise RuntimeError(f"{error}, {_FIX}") from None


def _lengths(ordering: Ordering, number: int, item: Any) -> tuple[int, ...]:
    try:
        lengths = ordering.lengths_of(item)
    except ValueError as error:
        is_ours = ordering.lengths_of is lengths_of_batch
        about = "" if is_ours else f"lengths= cannot tell those of microbatch {number}: "
        raise UnknownLengths(f"{about}{error}") from error
    try:
        return tuple(map(index, lengths))
    except TypeError:
        raise RuntimeError(
            f"the lengths of microbatch {number} are {lengths!r:.40}, but must be a list of whole numbers, "
            f"the tokens of each document; return a list such as [4096, 1200], {_FIX}"
        ) from None


def _read(iterator: Any, count: int) -> list[Any]:
    """Return the next ``count`` items; Megatron's iterators have no more than ``__next__``.

    RuntimeError where the data ends before, and where an item is what an earlier one was.
    """
    items, memory = list[Any](), _ItemMemory()
    for number in range(count):
        try:
            item = next(iterator)
        except StopIteration:
            raise RuntimeError(
                f"the data iterator ended after {number} of the {count} microbatches of this step; "
                "give it more data, or fewer microbatches to the step"
            ) from None
        memory.add(number, item)
        items.append(item)
    return items


class _Seen(NamedTuple):
    """The numbers at an end of ``tensor`` when it was read; it is kept so that its memory stays its own."""

    microbatch: int
    numbers: torch.Tensor
    tensor: torch.Tensor


class _ItemMemory:
    """The items of a step, and where their tensors are in memory.

    Two of them may share what stays, such as a mask or positions: so some numbers are compared.
    """

    def __init__(self) -> None:
        self._items: dict[int, int] = {}
        self._ends: dict[tuple[str, int], _Seen] = {}

    def add(self, number: int, item: Any) -> None:
        """Raise RuntimeError where ``item`` has overwritten an earlier one."""
        if (
            not isinstance(item, _IMMUTABLE)
            and (earlier := self._items.setdefault(id(item), number)) != number
        ):
            raise RuntimeError(
                f"the data iterator yields one {type(item).__name__} for microbatches {earlier} and "
                f"{number}, and an order reads ahead; yield a new one for each, {_FIX}"
            )
        for name, tensor in _tensors(item):
            for end, numbers in _ends(tensor):
                seen = self._ends.setdefault(end, _Seen(number, numbers, tensor))
                if seen.microbatch != number and not _are_alike(seen.numbers, numbers):
                    raise RuntimeError(
                        f"the data iterator has written microbatch {number} over microbatch {seen.microbatch}"
                        f"{name and f' ({name})'}, and an order reads ahead; yield tensors that are not used "
                        f"anew, {_FIX}"
                    )


def _tensors(item: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors and arrays of an item, each with its name in it."""
    if isinstance(item, np.ndarray) and item.flags.writeable:
        with suppress(TypeError, ValueError):  # torch does not have all that numpy has
            item = torch.from_numpy(item)
    if type(item) is torch.Tensor:
        if item.layout is torch.strided and item.numel():
            yield name, item
    elif isinstance(item, Mapping):
        for key, value in item.items():  # those of a TensorDict; it iterates over its rows
            yield from _tensors(value, str(key))
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _tensors(part, name)
    elif is_dataclass(item):
        for field in fields(item):
            yield from _tensors(getattr(item, field.name, None), field.name)


def _ends(tensor: torch.Tensor) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
    """Yield both ends of a tensor in memory, each with some of the numbers that are next to it."""
    numbers = tensor.detach()
    for first, place in (("first", 0), ("last", -1)):
        row = numbers
        while row.dim() > 1:
            row = row[place]
        row = row.reshape(-1)
        end = row[place]
        if place:
            row = row.flip(0)
        yield (first, end.data_ptr()), torch.cat((row[:_FIRST], row[_FIRST::_EVERY]))


def _are_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    count = min(len(first), len(second))
    return first.dtype == second.dtype and torch.equal(first[:count], second[:count])


def _other_use(name: str) -> RuntimeError:
    return RuntimeError(
        f"the loop uses {name} of its data iterator, which an order has read ahead; read it by next() alone, "
        f"{_FIX}"
    )
