"""Sends a tree of small tensors, such as the losses of a step, from one rank to another.

A message for every tensor would take longer than the tensors are worth, and the receiver does not know how
many there are.  Both ends therefore remember the form of the last tree.  While it stays the same, a tree
is one message of a length that both know.  A tree of another form is announced in the first bytes of that
message; its form and its numbers follow in a second one.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.groups import wire_of
from megatron_pp_ext.runtime.packing import Placed, TensorPlace, pack, unpack

_PROBLEM = ""
"""The name under which the problem of a tree travels that cannot; no part of a tree has it."""


class ObjectSend:
    """One end of a connection that takes trees from global rank ``sender`` to ``receiver`` of ``group``.

    A tree may hold what ``packing`` can describe: tensors of all of torch's kinds, numbers, texts, arrays
    and Python's containers of these.  Tensors arrive on ``device``, apart from those in the host's memory,
    without their graph, and a defaultdict without a factory of another type than these.  The receiver's host
    waits for each tree.
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
