"""Sends a tree of small tensors, such as the losses of a step, from one rank to another."""

import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.groups import wire_of


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Stands in a form for a plain tensor, whose numbers are bytes ``start`` to ``end`` of all."""

    dtype: torch.dtype
    shape: torch.Size
    start: int
    end: int
    on_host: bool


Placed = tuple[TensorPlace, torch.Tensor]

_SEQUENCES: dict[type, str] = {
    kind: kind.__name__ for kind in (list, tuple, set, frozenset, deque, torch.Size)
}
_MAPPINGS: dict[type, str] = {kind: kind.__name__ for kind in (dict, OrderedDict, defaultdict)}
_FACTORIES: dict[Any, str] = {kind: kind.__name__ for kind in (int, float, str, list, tuple, set, dict)}
_DTYPES = {dtype: str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_LAYOUTS = {layout: str(layout) for layout in vars(torch).values() if isinstance(layout, torch.layout)}
_NUMBERS = "biufc"
"""NumPy's letters of kinds of numbers."""

_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32)


def pack(tree: Any, name: str = "") -> tuple[bytes, list[Placed]]:
    """Return the form of ``tree``, called ``name``, and its plain tensors in the order of their places.

    ValueError, which names it, for the first part of a kind that forms do not have.

    The form is JSON, which names kinds of values from the tables of this module and nothing else: reading it
    runs no code, whoever has written it.  Each plain tensor has only a place in it.  Tensors of other kinds
    (jagged, sparse, quantized) are plain tensors, and how they belong together.
    """
    packer = _Packer()
    described = packer.described(tree, name)
    return json.dumps(described, separators=(",", ":")).encode(), list(packer.placed.values())


def unpack(form: bytes, tensor_at: Callable[[TensorPlace], torch.Tensor]) -> Any:
    """Return the tree of ``form``, whose plain tensors ``tensor_at`` returns.

    ValueError for bytes that are no form.
    """
    # A tensor that the tree has twice stays one: jagged tensors that share their offsets can be added.
    unpacker = _Unpacker(cache(tensor_at))
    try:
        return unpacker.value(json.loads(form))
    except (KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"these bytes are no form of a tree ({reason})") from None


class _Packer:
    """Describes the values of one tree, and places its plain tensors."""

    def __init__(self) -> None:
        self.placed: dict[int, Placed] = {}
        self._end = 0
        self._around: list[Any] = []

    def described(self, value: Any, name: str) -> Any:
        """Return ``value``, called ``name``, as JSON: itself, or a list that begins with its kind."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if any(value is outer for outer in self._around):
            raise ValueError(f"{name} cannot be copied (it contains itself)")
        self._around.append(value)
        try:
            if isinstance(value, torch.Tensor):
                described = self._tensor(value, name)
            elif kind in _SEQUENCES:
                parts = (self.described(part, f"{name}[{at}]") for at, part in enumerate(value))
                described = [_SEQUENCES[kind], *parts]
            elif kind in _MAPPINGS:
                factory = _FACTORIES.get(getattr(value, "default_factory", None), "")
                described = [_MAPPINGS[kind], factory, *self._items(value, name)]
            else:
                described = self._other(value, name)
        finally:
            self._around.pop()
        return described

    def _items(self, value: Mapping[Any, Any], name: str) -> list[Any]:
        items = []
        for key, part in value.items():
            path = f"{name}[{key!r}]" if name else str(key)
            items.append([self.described(key, f"the key of {path}"), self.described(part, path)])
        return items

    def _other(self, value: Any, name: str) -> list[Any]:
        match value:
            case bytes():
                return ["bytes", value.hex()]
            case complex():
                return ["complex", value.real, value.imag]
            case torch.dtype():
                return ["dtype", _DTYPES[value]]
            case np.ndarray() if value.dtype.kind in _NUMBERS:
                return ["array", self._plain(torch.from_numpy(np.array(value, order="C")))]
            case np.generic() if value.dtype.kind in _NUMBERS:
                return ["number", value.dtype.str, self.described(value.item(), name)]
        raise ValueError(f"{name} cannot be copied (it is of type {type(value).__qualname__})")

    def _tensor(self, value: torch.Tensor, name: str) -> list[Any]:
        if isinstance(value, torch.nn.Parameter):
            return ["parameter", self._tensor(value.detach(), name), value.requires_grad]
        attributes = vars(value) if type(value) is torch.Tensor else {}
        if attributes:
            of_names = [
                [attribute, self.described(part, f"{name}.{attribute}")]
                for attribute, part in attributes.items()
            ]
            return ["attributes", self._of_kind(value.detach(), name), *of_names]
        # By the tensor itself, which a tree may have twice, and not by a detached copy of it.
        return self._plain(value) if _is_plain(value) else self._of_kind(value.detach(), name)

    def _of_kind(self, value: Any, name: str) -> list[Any]:
        """Describe a tensor without a graph, by the plain tensors that it is made of."""
        plain = self._plain
        if _is_plain(value):
            return plain(value)
        if value.is_nested and value.layout is torch.jagged:
            lengths = value.lengths()
            packed_lengths = None if lengths is None else plain(lengths)
            return [
                "jagged",
                plain(value.values()),
                plain(value.offsets()),
                packed_lengths,
                value._ragged_idx,
            ]
        if value.is_nested:
            return ["nested", *(plain(tensor) for tensor in value.unbind())]
        if value.is_quantized and value.dtype in _QUANTIZED:
            if value.qscheme() is torch.per_tensor_affine:
                return ["quantized", plain(value.int_repr()), value.q_scale(), value.q_zero_point()]
            scales, zeros = value.q_per_channel_scales(), value.q_per_channel_zero_points()
            axis = value.q_per_channel_axis()
            return ["by channel", plain(value.int_repr()), plain(scales), plain(zeros), axis]
        if type(value) is torch.Tensor and value.is_meta:
            return ["meta", _DTYPES[value.dtype], list(value.shape)]
        if value.layout is torch.sparse_coo:
            indices, values = plain(value._indices()), plain(value._values())
            return ["sparse", indices, values, list(value.shape), value.is_coalesced()]
        if value.layout in (torch.sparse_csr, torch.sparse_bsr):
            places = value.crow_indices(), value.col_indices()
        elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
            places = value.ccol_indices(), value.row_indices()
        else:
            raise ValueError(f"{name} cannot be copied (it is of type {type(value).__qualname__})")
        parts = [plain(tensor) for tensor in (*places, value.values())]
        return ["compressed", *parts, list(value.shape), _LAYOUTS[value.layout]]

    def _plain(self, value: torch.Tensor) -> list[Any]:
        if id(value) not in self.placed:
            start, self._end = self._end, self._end + value.numel() * value.element_size()
            on_host = value.device.type == "cpu"
            self.placed[id(value)] = TensorPlace(value.dtype, value.shape, start, self._end, on_host), value
        place, _ = self.placed[id(value)]
        return ["tensor", _DTYPES[place.dtype], list(place.shape), place.start, place.end, place.on_host]


class _Unpacker:
    """Makes the values of one form."""

    def __init__(self, tensor_at: Callable[[TensorPlace], torch.Tensor]) -> None:
        self._tensor_at = tensor_at

    def value(self, described: Any) -> Any:
        if not isinstance(described, list):
            return described
        kind, *about = described
        if kind in _SEQUENCES_OF:
            return _SEQUENCES_OF[kind](map(self.value, about))
        if kind in _MAPPINGS_OF:
            factory, *items = about
            pairs = ((self.value(key), self.value(part)) for key, part in items)
            if kind == "defaultdict":
                return defaultdict(_FACTORIES_OF.get(factory), pairs)
            return _MAPPINGS_OF[kind](pairs)
        match kind:
            case "bytes":
                return bytes.fromhex(*about)
            case "complex":
                return complex(*about)
            case "dtype":
                return _DTYPES_OF[about[0]]
            case "array":
                return self.value(about[0]).cpu().numpy()
            case "number":
                dtype = np.dtype(about[0])
                if dtype.kind in _NUMBERS:
                    return dtype.type(self.value(about[1]))
            case "attributes":
                tensor = self.value(about[0])
                for name, part in about[1:]:
                    setattr(tensor, name, self.value(part))
                return tensor
        return self._tensor(kind, *about)

    def _tensor(self, kind: str, *about: Any) -> torch.Tensor:
        if kind == "tensor":
            dtype, shape, start, end, on_host = about
            return self._tensor_at(TensorPlace(_DTYPES_OF[dtype], torch.Size(shape), start, end, on_host))
        if kind == "meta":
            dtype, shape = about
            return torch.empty(shape, dtype=_DTYPES_OF[dtype], device="meta")
        # A plain tensor among the parts is a list with its kind first; a shape is a list of numbers.
        parts = [
            self.value(part) if isinstance(part, list) and part[:1] == ["tensor"] else part for part in about
        ]
        match kind:
            case "parameter":
                return torch.nn.Parameter(self.value(about[0]), requires_grad=bool(about[1]))
            case "jagged":
                values, offsets, lengths, dimension = parts
                return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, dimension)
            case "nested":
                return torch.nested.as_nested_tensor(parts, layout=torch.strided)
            case "quantized":
                return torch._make_per_tensor_quantized_tensor(*parts)
            case "by channel":
                return torch._make_per_channel_quantized_tensor(*parts)
            case "sparse":
                indices, values, shape, is_coalesced = parts
                return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced)
            case "compressed":
                first, second, values, shape, layout = parts
                return torch.sparse_compressed_tensor(
                    first, second, values, shape, layout=_LAYOUTS_OF[layout]
                )
        raise ValueError(f"these bytes are no form of a tree (a value of kind {kind!r})")


_SEQUENCES_OF = {name: kind for kind, name in _SEQUENCES.items()}
_MAPPINGS_OF = {name: kind for kind, name in _MAPPINGS.items()}
_FACTORIES_OF = {name: kind for kind, name in _FACTORIES.items()}
_DTYPES_OF = {name: dtype for dtype, name in _DTYPES.items()}
_LAYOUTS_OF = {name: layout for layout, name in _LAYOUTS.items()}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is its numbers in memory, and nothing else."""
    is_special = tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor.layout != torch.strided
    return type(tensor) is torch.Tensor and not is_special and not vars(tensor)


_PROBLEM = ""
"""The name under which the problem of a tree travels that cannot; no part of a tree has it."""


class ObjectSend:
    """One end of a connection that takes trees from global rank ``sender`` to ``receiver`` of ``group``.

    A tree may hold what ``packing`` can describe: tensors of all of torch's kinds, numbers, texts, arrays
    and Python's containers of these.  Tensors arrive on ``device``, apart from those in the host's memory,
    without their graph, and a defaultdict without a factory of another type than these.  The receiver's host
    waits for each tree.

    A message for every tensor would take longer than the tensors are worth, and the receiver does not know
    how many there are.  Both ends therefore remember the form of the last tree.  While it stays the same, a
    tree is one message of a length that both know.  A tree of another form is announced in the first bytes of
    that message; its form and its numbers follow in a second one.
    """

    def __init__(self, sender: int, receiver: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.sender, self.receiver, self.group, self.wire = sender, receiver, group, wire_of(group, device)
        self._device = device
        self._form = b""
        self._length = 0

    def send(self, **parts: Any) -> None:
        """Send a tree of ``parts`` by name; ValueError, here and from ``receive``, for what cannot travel."""
        try:
            form, placed = pack(parts)
        except ValueError as error:
            problem = (
                f"{error}, and has to go from rank {self.sender}, which computes it, to rank "
                f"{self.receiver}, where Megatron looks for it; let the loss function return tensors, "
                "numbers, texts, and lists, tuples or dicts of these"
            )
            self._send_packed(*pack({_PROBLEM: problem}))
            raise ValueError(problem) from None
        self._send_packed(form, placed)

    def receive(self) -> dict[str, Any]:
        """Return the parts that were sent."""
        header = len(self._announcement(0, 0))
        message = self._receive(header + self._length)
        form_length, length = message[:header].view(torch.long).tolist()
        numbers = message[header:]
        if form_length:
            message = self._receive(form_length + length)
            self._form, self._length = bytes(message[:form_length].tolist()), length
            numbers = message[form_length:]

        @cache
        def arrived(on_host: bool) -> torch.Tensor:
            return numbers.to("cpu" if on_host else self._device)

        def tensor_at(place: TensorPlace) -> torch.Tensor:
            # Cloned, since a view in another dtype has to begin at a multiple of its size.
            numbers_of = arrived(place.on_host)[place.start : place.end].clone()
            return numbers_of.view(place.dtype).reshape(place.shape)

        parts = unpack(self._form, tensor_at)
        if _PROBLEM in parts:
            raise ValueError(parts[_PROBLEM])
        return dict(parts)

    def _send_packed(self, form: bytes, placed: list[Placed]) -> None:
        numbers = [_bytes_of(tensor).to(self.wire) for _, tensor in placed]
        if form == self._form:
            self._send(self._announcement(0, 0), *numbers)
            return
        length = sum(map(len, numbers))
        unused = torch.zeros(self._length, dtype=torch.uint8, device=self.wire)
        self._send(self._announcement(len(form), length), unused)
        self._send(torch.frombuffer(bytearray(form), dtype=torch.uint8).to(self.wire), *numbers)
        self._form, self._length = form, length

    def _announcement(self, form_length: int, length: int) -> torch.Tensor:
        return torch.tensor([form_length, length], device=self.wire).view(torch.uint8)

    def _send(self, *parts: torch.Tensor) -> None:
        dist.send(torch.cat(parts), self.receiver, group=self.group)

    def _receive(self, length: int) -> torch.Tensor:
        message = torch.empty(length, dtype=torch.uint8, device=self.wire)
        dist.recv(message, self.sender, group=self.group)
        return message


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of ``tensor``, which may be laid out in any order, as a row of bytes."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
