"""A model that Megatron builds on one CPU rank: how many parameters it has, and what its forward keeps."""

import weakref
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import pytest
import torch

from tests.support.training import train  # has to come before Megatron, and installs what it needs on a CPU

# isort: split
from megatron.training import get_args

from megatron_pp_ext.runtime.activation_meter import ActivationMeter, Owner
from megatron_pp_ext.runtime.storages import storages


class Built(NamedTuple):
    """The number of a model's parameters, and the bytes that a forward of one microbatch keeps."""

    parameters: int
    kept: int


@cache
def built(flags: str) -> Built:
    """Return what Megatron's own layers make of the tiny GPT with ``flags`` on one rank."""
    with pytest.MonkeyPatch.context() as patch:
        # Megatron's check of --moe-grouped-gemm asks for a device.
        patch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
        (run,) = train(1, [*flags.split(), "--train-iters", "1"], grab=_measured)
    return Built(*run.grabbed)


class _Meter(ActivationMeter):
    """Knows what is kept, and not only its bytes when autograd saved it: recomputation may discard it."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters)
        self.held: list[weakref.ref] = []

    def hold(self, owner: Owner | None, tensor: torch.Tensor, holder: object) -> None:
        super().hold(owner, tensor, holder)
        self.held.append(weakref.ref(holder))

    @property
    def bytes_now(self) -> int:
        kept = [holder.tensor for one in self.held if (holder := one()) is not None]
        found = {key: size for tensor in kept for key, size in storages(tensor).items()}
        return sum(size for key, size in found.items() if key not in self._ignored)


def _measured(chunks: Sequence[torch.nn.Module]) -> tuple[int, int]:
    (chunk,) = chunks
    args = get_args()
    shape = args.micro_batch_size, args.seq_length
    tokens = torch.randint(0, args.padded_vocab_size, shape)
    positions = torch.arange(args.seq_length).expand(shape)
    hidden = torch.ones(args.seq_length, args.seq_length, dtype=torch.bool).triu(1)[None, None]
    parameters = list(chunk.parameters())
    meter = _Meter(parameters)
    with meter.forward(Owner(0, 0)):
        loss = chunk(tokens, positions, hidden, labels=tokens)
    kept = meter.bytes_now
    loss.sum().backward()
    return sum(one.numel() for one in parameters), kept
