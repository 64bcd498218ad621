"""A model that Megatron builds on one CPU rank: how many parameters it has, and what its forward keeps."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from tests.support.training import train  # has to come before Megatron, and installs what it needs on a CPU

# isort: split
from megatron.training import get_args

from megatron_pp_ext.runtime.activation_meter import ActivationMeter, Owner


class Built(NamedTuple):
    """The number of a model's parameters, and the bytes that a forward of one microbatch keeps."""

    parameters: int
    kept: int


@cache
def built(flags: str) -> Built:
    """Return what Megatron's own layers make of the tiny GPT with ``flags`` on one rank."""
    (run,) = train(1, [*flags.split(), "--train-iters", "1"], grab=_measured)
    return Built(*run.grabbed)


def _measured(chunks: Sequence[torch.nn.Module]) -> tuple[int, int]:
    (chunk,) = chunks
    args = get_args()
    shape = args.micro_batch_size, args.seq_length
    tokens = torch.randint(0, args.padded_vocab_size, shape)
    positions = torch.arange(args.seq_length).expand(shape)
    hidden = torch.ones(args.seq_length, args.seq_length, dtype=torch.bool).triu(1)[None, None]
    parameters = list(chunk.parameters())
    meter = ActivationMeter(parameters)
    with meter.forward(Owner(0, 0)):
        loss = chunk(tokens, positions, hidden, labels=tokens)
    kept = meter.live_bytes
    loss.sum().backward()
    return sum(one.numel() for one in parameters), kept
