"""Sends a tree of small tensors, such as the losses of a step, from one rank to another.

A message for every tensor would take longer than the tensors are worth, and the receiver does not know how
many there are.  Both ends therefore remember the form of the last tree.  While it stays the same, a tree
is one message of a length that both know.  A tree of another form is announced in the first bytes of that
message; its form and its numbers follow in a second one.
"""

import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from megatron_pp_ext.runtime.groups import wire_of


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands in a form for a tensor of the tree, whose numbers are bytes ``start`` to ``end`` of all."""

    dtype: torch.dtype
    shape: torch.Size
    start: int
    end: int


class Parcels:
    """One end of a connection that takes trees from global rank ``sender`` to ``receiver`` of ``group``.

    ``device`` is that of a tree's tensors at both ends.  Leaves that are no tensors are pickled.  The
    receiver's host waits for each tree.
    """

    def __init__(self, sender: int, receiver: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._sender, self._receiver, self._group, self._device = sender, receiver, group, device
        self._wire = wire_of(group, device)
        self._form = b""
        self._length = 0

    def send(self, tree: Any) -> None:
        """Send ``tree``."""
        numbers: list[torch.Tensor] = []
        length = 0

        def place_of(tensor: torch.Tensor) -> _Place:
            nonlocal length
            numbers.append(tensor.detach().reshape(-1).view(torch.uint8).to(self._wire))
            start, length = length, length + len(numbers[-1])
            return _Place(tensor.dtype, tensor.shape, start, length)

        form = pickle.dumps(tree_map_only(torch.Tensor, place_of, tree))
        if form == self._form:
            self._send(self._announcement(0, 0), *numbers)
            return
        unused = torch.zeros(self._length, dtype=torch.uint8, device=self._wire)
        self._send(self._announcement(len(form), length), unused)
        self._send(torch.frombuffer(bytearray(form), dtype=torch.uint8).to(self._wire), *numbers)
        self._form, self._length = form, length

    def receive(self) -> Any:
        """Return the tree that was sent."""
        header = len(self._announcement(0, 0))
        message = self._receive(header + self._length)
        form_length, length = message[:header].view(torch.long).tolist()
        numbers = message[header:]
        if form_length:
            message = self._receive(form_length + length)
            self._form, self._length = bytes(message[:form_length].tolist()), length
            numbers = message[form_length:]
        numbers = numbers.to(self._device)

        def tensor_at(place: _Place) -> torch.Tensor:
            # Cloned, since a view in another dtype has to begin at a multiple of its size.
            return numbers[place.start : place.end].clone().view(place.dtype).reshape(place.shape)

        return tree_map_only(_Place, tensor_at, pickle.loads(self._form))

    def _announcement(self, form_length: int, length: int) -> torch.Tensor:
        return torch.tensor([form_length, length], device=self._wire).view(torch.uint8)

    def _send(self, *parts: torch.Tensor) -> None:
        dist.send(torch.cat(parts), self._receiver, group=self._group)

    def _receive(self, length: int) -> torch.Tensor:
        message = torch.empty(length, dtype=torch.uint8, device=self._wire)
        dist.recv(message, self._sender, group=self._group)
        return message
