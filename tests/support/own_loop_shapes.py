"""The loop of ``own_loop`` on unlike lengths, and how many messages announce their shapes in it."""

from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from megatron_pp_ext.runtime.channels import Channels
from tests.support import own_loop

COUNTS = (8, 5, 5)
LENGTHS = (8, 5, 7, 3, 2)
MULTIPLE = 4


def padding_step(iterator: Any, model: Any, is_padded: Any = lambda: True) -> Any:
    """A forward step that pads its batch to a multiple of tokens."""
    batch = next(iterator)
    missing = -batch["input_ids"].shape[1] % MULTIPLE if is_padded() else 0
    length = batch.pop("attention_mask").shape[-1] + missing
    batch = {name: pad(tensor, (0, missing)) for name, tensor in batch.items()}
    mask = torch.triu(torch.ones(1, 1, length, length), 1).bool()
    return model(**batch, attention_mask=mask), partial(own_loop._mean)


def announced(chunks: int = 1, **about: Any) -> list[int]:
    """Train, and return how many messages have announced their shapes in each step on this rank."""
    return trained(chunks, **about)[1]


def trained(chunks: int, **about: Any) -> tuple[own_loop.Record, list[int]]:
    """Train on unlike lengths; return the results, and the announcements of each step."""
    announcements, keep, run = list[int](), Channels._keep, own_loop.run_step

    def watched(channels: Channels, *args: Any) -> None:
        announcements[-1] += 1
        keep(channels, *args)

    def step(*args: Any, **of_step: Any) -> Any:
        announcements.append(0)
        return run(*args, **of_step)

    Channels._keep, own_loop.run_step = watched, step
    try:
        model = own_loop.build(chunks, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
        record = own_loop.train(model, COUNTS, LENGTHS, seq_length=1, **about)
    finally:
        Channels._keep, own_loop.run_step = keep, run
    return record, announcements
